"""`menet evaluate`: attack a model, score it on fresh random draws, and write one record per example."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from menet.commands import Csv, Json, Latex, Output, printing
from menet.commands.options import (
    ATTACKS,
    Data,
    Device,
    Epsilons,
    MaxBatch,
    Root,
    Run,
    Seed,
    Side,
    SkipUnreadable,
    Split,
)


@dataclass(frozen=True)
class Evaluate:
    """Attack a model and score the adversarial images on fresh random draws, never those the attack saw.

    One record is written per example and attack. Safe to interrupt: rerun the same command to resume, or with a
    larger --stop to extend. Under torchrun the processes divide the work.

    An attack is NAME or NAME:SETTING=VALUE,… such as `pgd:steps=40`, `bpda-eot:steps=100,eot=40`,
    `pgd:gradient=exact`, `pgd:on=classifier` (gray box), `pgd:on=OTHER_RUN` (transfer attack with OTHER_RUN as
    the surrogate) or `boundary:draws=fixed:10` (on a fixed bank of 10 draws, for attacks that need a
    deterministic model; `draws=frozen:1` scores on it too: what remains of a random defense if its draws are
    known). `standard`, the default, is the worst case over attacks that a result should be reported
    with. Your own attack is `package.module:Class`; naming it executes that module.
    """

    run: Run

    attacks: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="[ATTACK …]", help=f"Attacks with their settings: {', '.join(ATTACKS)}."),
    ] = ("standard",)

    budget: Literal["quick", "standard", "thorough"] = "standard"
    """Compute of the attack `standard`: at most 400, 2,500 or 20,000 gradient passes per example."""

    data: Data = None

    split: Split = "test"

    root: Root = None

    side: Side = None

    skip_unreadable: SkipUnreadable = False

    epsilon: Epsilons = ()

    norm: Literal["linf", "l2", "l0"] = "linf"
    """Norm of the perturbation; for l0, epsilon is a number of pixels."""

    start: int = 0
    """First example."""

    stop: int | None = 1000
    """One past the last example; a number larger than the dataset means all."""

    draws: int = 100
    """Fresh random draws that each image is scored on."""

    restart_draws: int = 1
    """Fresh random draws that each restart is scored on."""

    batch_size: int | None = None
    """Examples attacked together: at most this many are lost if the command is killed.
    Default: 100, or fewer where fewer are asked for."""

    max_batch: MaxBatch = 512

    seed: Seed = 0

    snapshots: int = 0
    """Keep the images of this many examples for the report."""

    loss_history: bool = False
    """Keep the loss of each example at every step of the attack."""

    bfloat16: bool = False
    """Attack a random model with its network in bfloat16: half the time on a processor with such instructions.
    Scores are float32 all the same, and results say how they were attacked."""

    device: Device = "auto"

    out: Path | None = None
    """Folder for the records. Default: RUN/evaluation."""

    against: Path | None = None
    """Another run, or a folder of records, to compare with on the same examples (McNemar's test)."""

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.commands.options import default_folder, epsilon_of, model_of, subject_of
        from menet.errors import ConfigurationError
        from menet.evaluation import EvaluationSettings, Worker, accuracies, evaluate, parse_attack
        from menet.files import write_atomically
        from menet.report.accuracy_tables import comparison, every_accuracy
        from menet.report.collect import Subject, evaluations_of

        model, source, dataset, device = subject_of(
            self.run, self.data, self.split, self.root, self.side, self.skip_unreadable, self.device
        )
        budgets = [epsilon_of(text, dataset.name, self.norm) for text in self.epsilon or (None,)]
        attacks = [
            parse_attack(spec, model, lambda run: model_of(run)[0], epsilon=budgets[0], norm=self.norm)
            for spec in self._specs()
        ]
        settings = EvaluationSettings(
            start=self.start,
            stop=None if self.stop is None else min(self.stop, len(dataset)),
            batch_size=self.batch_size,
            draws=self.draws,
            restart_draws=self.restart_draws,
            seed=self.seed,
            max_batch=self.max_batch,
            snapshots=self.snapshots,
            loss_history=self.loss_history,
            bfloat16=self.bfloat16,
        )
        folder = self.out or default_folder(self.run, "evaluation")
        worker = Worker.from_environment()
        records = evaluate(model, dataset, attacks, folder, settings, source=source, device=device, worker=worker)
        waiting = sum(len(one.missing) for one in records.values())
        if waiting:
            print(f"process {worker.rank} is done; other processes still work on {waiting} examples")
            return 0
        subject = Subject(self.run, records)
        for label, found in records.items():
            table = every_accuracy(Subject(label, {label: found}))
            columns = ("criterion", "clean accuracy", "robust accuracy")
            out.table(table.only(*columns, explanation=table.explanation))
            if any("member" in row for row in found.rows):
                print(_spent(label, found.rows))
            unusable = sum(row.get("unusable_gradients", False) for row in found.rows)
            if unusable:
                print(
                    f"{label}: gradients were NaN, infinite or zero for {unusable} of {len(found.rows)} "
                    "examples; robust accuracy may be overestimated"
                )
        if self.against is not None:
            other = Subject(str(self.against), evaluations_of(self.against))
            shared = [label for label in records if label in other.evaluations]
            if not shared:
                raise ConfigurationError(
                    f"{self.against} has none of the attacks {', '.join(records)}; evaluate that model first"
                )
            out.table(comparison(subject, other, shared))
        numbers = {label: [asdict(one) for one in accuracies(found)] for label, found in records.items()}
        out.value(accuracies=numbers, records=folder)
        write_atomically(folder / "accuracies.json", json.dumps(numbers, indent=1))
        print(f"records: {folder}")
        return 0

    def _specs(self) -> tuple[str, ...]:
        """The attacks as their records are called, with their budgets where these are not the default."""
        attacks = tuple(
            f"standard:budget={self.budget}" if spec == "standard" and self.budget != "standard" else spec
            for spec in self.attacks
        )
        if len(self.epsilon) < 2:
            return attacks
        from menet.attacks import split_name

        specs = []
        for spec in attacks:
            _, settings = split_name(spec)
            if any(one.startswith("epsilon=") for one in settings.split(",")):
                specs.append(spec)
            else:
                specs += [f"{spec}{',' if settings else ':'}epsilon={text}" for text in self.epsilon]
        return tuple(specs)


def _spent(label: str, rows: Sequence[dict[str, Any]]) -> str:
    """What a suite cost, and which of its members found how many of the images."""
    members = Counter(row["member"] for row in rows).most_common()
    forward, backward = (sum(row[kind] for row in rows) / len(rows) for kind in ("queries", "gradients"))
    found = ", ".join(f"{member} {count / len(rows):.0%}" for member, count in members)
    return f"{label}: {forward:,.0f} forward and {backward:,.0f} backward passes per example; found by {found}"
