"""`menet audit`: what a careful reviewer would check before believing a robustness claim."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from menet.commands import Csv, Json, Latex, Output, printing
from menet.commands.options import (
    Data,
    Device,
    Epsilon,
    MaxBatch,
    Norm,
    Root,
    Run,
    Seed,
    Side,
    SkipUnreadable,
    Split,
)

if TYPE_CHECKING:
    from menet.evaluation.audit import Finding


@dataclass(frozen=True)
class Audit:
    """Check a classifier as a careful reviewer would: sweeps, gradients, noise, black-box attacks, randomness.

    Takes a run of `menet train`, or any model of yours: `menet audit package.module:factory --data FOLDER`
    imports the module (the current folder is searched too) and calls the factory, which returns an
    `nn.Module` from images in [0,1] to logits. The exit code is 1 if a check fails. Safe to interrupt: rerun the
    same command to resume with the checks that are left.
    """

    target: Run

    data: Data = None

    split: Split = "test"

    root: Root = None

    side: Side = None

    skip_unreadable: SkipUnreadable = False

    epsilon: Epsilon = None

    norm: Norm = "linf"
    """Norm of the perturbation."""

    examples: int = 100
    """Number of examples, from the first one on; datasets mix their classes."""

    steps: int = 40
    """Steps of the audited attack."""

    gradient: Annotated[
        Literal["exact", "bpda"] | None, tyro.conf.arg(metavar="{exact,bpda}", help_behavior_hint="")
    ] = None
    """How gradients of the audited attack pass a defense. Default: as in the run."""

    eot: int = 20
    """Random draws of the defense averaged in each of its gradients (EOT)."""

    draws: int = 50
    """Fresh random draws that each image is scored on."""

    quick: bool = False
    """A tenth of the work: enough to find faults, too little to publish."""

    max_batch: MaxBatch = 512

    seed: Seed = 0

    device: Device = "auto"

    out: Path | None = None
    """File for the findings. Default: RUN/audit.json."""

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        import torch

        from menet.attacks import ThreatModel
        from menet.commands.options import default_folder, epsilon_of, subject_of
        from menet.data.dataset import warn_of_missing_classes
        from menet.errors import ConfigurationError
        from menet.evaluation import AuditSettings, audit, provenance
        from menet.evaluation.audit import failed
        from menet.files import require_writable, write_atomically
        from menet.preprocessed import Preprocessed
        from menet.report.accuracy_tables import audit_table

        model, source, dataset, device = subject_of(
            self.target, self.data, self.split, self.root, self.side, self.skip_unreadable, self.device
        )
        if self.gradient is not None:
            if not isinstance(model, Preprocessed):
                raise ConfigurationError(
                    f"--gradient {self.gradient} needs a model with preprocessing, got a {type(model).__name__}"
                )
            model = model.with_gradient(self.gradient)
        threat = ThreatModel(self.norm, epsilon_of(self.epsilon, dataset.name, self.norm))
        settings = AuditSettings(
            threat, steps=self.steps, eot=self.eot, draws=self.draws, max_batch=self.max_batch
        )
        settings = settings.quick() if self.quick else settings
        if self.examples < 1:
            raise ConfigurationError(f"expected examples >= 1, got {self.examples}")
        file = self.out or default_folder(self.target, "audit.json")
        # A folder that cannot be written should be known before minutes of work, not after.
        require_writable(file)
        count = min(self.examples, 40) if self.quick else self.examples
        warn_of_missing_classes(dataset, 0, min(count, len(dataset)))
        images, labels = dataset.batch(slice(0, count))
        content: dict[str, Any] = {
            "format": "menet.audit/1",
            "model": provenance.of_model(model),
            "dataset": provenance.of_dataset(dataset),
            "examples": len(images),
            "settings": provenance.plain(settings),
            "seed": self.seed,
        }
        unfinished = file.with_name(f"{file.stem}.unfinished.json")
        rows: list[dict[str, Any]] = []

        def keep(findings: "list[Finding]") -> None:
            rows[:] = [provenance.plain(asdict(finding)) for finding in findings]
            kept = {**content, "findings": rows}
            write_atomically(unfinished, json.dumps({**kept, "sha256": _digest(kept)}, indent=1))

        findings = audit(
            model,
            images.to(device),
            labels.to(device),
            settings,
            torch.Generator().manual_seed(self.seed),
            finished=_finished(unfinished, content),
            keep=keep,
        )
        rows = [provenance.plain(asdict(finding)) for finding in findings]
        out.table(audit_table(rows))
        out.value(findings=rows, file=file)
        made = {"source": source, **provenance.of_machine(device)}
        write_atomically(file, json.dumps({**content, "made": made, "findings": rows}, indent=1))
        unfinished.unlink(missing_ok=True)
        print(f"findings: {file}")
        return int(failed(findings))


def _finished(file: Path, content: dict[str, Any]) -> "list[Finding]":
    """The findings of an audit that was interrupted; none if it was another one, or its file is damaged."""
    from menet.evaluation.audit import Finding

    try:
        found = json.loads(file.read_bytes())
        intact = found.pop("sha256") == _digest(found)
        rows = found.pop("findings")
        same = found == json.loads(json.dumps(content))
        return [Finding(**row) for row in rows] if intact and same else []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
