"""`menet audit`: what a careful reviewer would check before believing a robustness number."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from menet.attacks import ThreatModel
from menet.attacks.threat import Norm
from menet.commands.subjects import dataset_of, default_folder, device_of, epsilon_of, model_of
from menet.evaluation import AuditSettings, Finding, audit, description
from menet.evaluation.audit import failed
from menet.files import write_atomically

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Audit:
    """Check a classifier as a careful reviewer would: sweeps, gradients, noise, black box, masks, generators.

    For a run of `menet train`, or for any model of yours: `menet audit package.module:factory --data FOLDER`
    imports the module (the current folder is searched too) and calls the factory, which returns an
    `nn.Module` from images in [0,1] to logits. The exit code is 1 when a check fails.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder or weights file of `menet train`, or package.module:factory."""

    data: str | None = None
    """digits, mnist, cifar10, svhn, tiny-imagenet or a folder of images; by default that of the training."""

    split: str = "test"
    """train or test."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    side: int | None = None
    """Scale and crop a folder's images to this size."""

    epsilon: str | None = None
    """Size of the change an adversary may make, in pixels of [0,1]; as in the paper, 0.3 for digits and mnist
    and 8/255 for others, if not given."""

    norm: Norm = "linf"
    """The norm it is measured in."""

    examples: int = 100
    """How many examples to use, from the start."""

    steps: int = 40
    """Steps of the audited attack."""

    eot: int = 20
    """Draws behind each of its gradients."""

    masks: int = 50
    """Fresh masks behind each accuracy."""

    quick: bool = False
    """A tenth of the work: enough to see faults, too little to publish."""

    rows: int = 512
    """Most images in one forward pass: less memory when smaller."""

    seed: int = 0
    """All randomness comes from it."""

    device: str = "cpu"
    """cpu, cuda, …"""

    out: Path | None = None
    """File for the findings; RUN/audit.json if not given."""

    def __call__(self) -> int:
        model, source = model_of(self.target)
        dataset = dataset_of(self.data, self.target, self.split, self.root, self.side)
        device = device_of(self.device)
        threat = ThreatModel(self.norm, epsilon_of(self.epsilon, dataset.name))
        settings = AuditSettings(threat, steps=self.steps, eot=self.eot, masks=self.masks, rows=self.rows)
        settings = settings.quick() if self.quick else settings
        count = min(self.examples, 40) if self.quick else self.examples
        images, labels = dataset.batch(slice(0, count))
        findings = audit(
            model.to(device),
            images.to(device),
            labels.to(device),
            settings,
            torch.Generator().manual_seed(self.seed),
        )
        content = {
            "format": "menet.audit/1",
            "model": description.of_model(model),
            "dataset": description.of_dataset(dataset),
            "examples": len(images),
            "settings": description.plain(settings),
            "seed": self.seed,
            "made": {"source": source, **description.of_machine(device)},
            "findings": [description.plain(asdict(finding)) for finding in findings],
        }
        file = self.out or default_folder(self.target, "audit.json")
        write_atomically(file, json.dumps(content, indent=1))
        show(findings)
        print(f"findings: {file}")
        return int(failed(findings))


def show(findings: list[Finding]) -> None:
    """Print the findings as a table."""
    table = Table(show_lines=True)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it means")
    for finding in findings:
        colour = COLOURS[finding.status]
        numbers = "\n".join(f"[dim]{name}: {_words(value)}[/dim]" for name, value in finding.numbers.items())
        table.add_row(
            finding.name,
            f"[{colour}]{finding.status}[/{colour}]",
            finding.meaning + ("\n" + numbers if numbers else ""),
        )
    Console().print(table)


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
