"""`menet evaluate`: attack a model, score it on fresh masks, and write one row per example and attack."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from menet.attacks.threat import Norm
from menet.commands.subjects import dataset_of, default_folder, device_of, epsilon_of, model_of
from menet.errors import ConfigurationError
from menet.evaluation import (
    CRITERIA,
    Records,
    Settings,
    Worker,
    accuracies,
    assign,
    compare,
    evaluate,
    read_folder,
)
from menet.files import write_atomically


@dataclass(frozen=True)
class Evaluate:
    """Attack a model and score it on fresh masks, never those the attack saw; one row per example and attack.

    Stopped at any time and started again, it goes on where it was. Under torchrun the processes share the
    work. Attacks are written NAME or NAME:SETTING=VALUE,… such as `pgd:steps=40`, `bpda-eot:steps=100,eot=40`,
    `pgd:gradient=exact`, `pgd:on=classifier` (gray box) or `pgd:on=OTHER_RUN` (transfer).
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder or weights file of `menet train`, or package.module:factory."""

    attacks: tuple[str, ...] = ("pgd",)
    """The attacks, by their names and settings."""

    data: str | None = None
    """digits, mnist, cifar10, svhn, tiny-imagenet or a folder of images; by default that of the training."""

    split: str = "test"
    """train or test."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    epsilon: str | None = None
    """Size of the change an adversary may make, in pixels of [0,1]; as in the paper, 0.3 for digits and mnist
    and 8/255 for others, if not given."""

    norm: Norm = "linf"
    """The norm it is measured in."""

    start: int = 0
    """First example."""

    stop: int | None = 1000
    """One past the last example; more than there are means all."""

    masks: int = 100
    """Fresh masks that every image is scored on."""

    restart_masks: int = 1
    """Fresh masks that each restart is scored on."""

    batch: int = 100
    """Examples attacked together; at most this many are lost when it is killed."""

    rows: int = 512
    """Most images in one forward pass: less memory when smaller."""

    seed: int = 0
    """All randomness comes from it."""

    pictures: int = 0
    """Keep the images of the first so many examples for the report."""

    trace: bool = False
    """Keep each example's loss at every step."""

    device: str = "cpu"
    """cpu, cuda, …"""

    out: Path | None = None
    """Folder for the rows; RUN/evaluation if not given."""

    against: Path | None = None
    """Folder of another model's rows, to compare with example by example (McNemar)."""

    def __call__(self) -> int:
        model, source = model_of(self.run)
        dataset = dataset_of(self.data, self.run, self.split, self.root)
        epsilon = epsilon_of(self.epsilon, dataset.name)
        assignments = [
            assign(words, model, lambda run: model_of(run)[0].eval(), epsilon=epsilon, norm=self.norm)
            for words in self.attacks
        ]
        settings = Settings(
            start=self.start,
            stop=None if self.stop is None else min(self.stop, len(dataset)),
            batch=self.batch,
            masks=self.masks,
            restart_masks=self.restart_masks,
            seed=self.seed,
            rows=self.rows,
            pictures=self.pictures,
            trace=self.trace,
        )
        folder = self.out or default_folder(self.run, "evaluation")
        place = Worker.from_environment()
        records = evaluate(
            model,
            dataset,
            assignments,
            folder,
            settings,
            source=source,
            device=device_of(self.device),
            place=place,
        )
        waiting = sum(len(one.missing) for one in records.values())
        if waiting:
            print(f"process {place.rank} is done; {waiting} rows are still being made by others")
            return 0
        show(records)
        if self.against is not None:
            show_comparison(records, read_folder(self.against))
        numbers = {label: [asdict(one) for one in accuracies(found)] for label, found in records.items()}
        write_atomically(folder / "accuracies.json", json.dumps(numbers, indent=1))
        print(f"rows: {folder}")
        return 0


def show(records: dict[str, Records]) -> None:
    """Print the accuracies of every attack, clean beside adversarial."""
    console = Console()
    for label, found in records.items():
        table = Table(title=_title(label, found), title_justify="left", title_style="bold")
        for name, justify in (("accuracy", "left"), ("clean", "right"), ("under attack", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        numbers = accuracies(found)
        tops = sorted({number.top for number in numbers})
        by = {(number.images, number.criterion, number.top): number for number in numbers}
        for top in tops:
            for criterion, meaning in CRITERIA.items():
                clean, attacked = (by[images, criterion, top] for images in ("clean", "adversarial"))
                table.add_row(f"top-{top} {meaning}", _words(clean), _words(attacked))
        for number in numbers:
            if number.images == "restarts":
                table.add_row(f"top-1 {number.criterion} over restarts", "", _words(number))
        console.print(table)


def show_comparison(records: dict[str, Records], others: dict[str, Records]) -> None:
    """Print, for every attack both were put to, whether two models differ."""
    shared = [label for label in records if label in others]
    if not shared:
        raise ConfigurationError(f"against has none of the attacks {', '.join(records)}")
    for label in shared:
        found = compare(records[label], others[label])
        print(
            f"{label}, by vote on {found.examples} examples: {found.difference:+.1%}, right alone on "
            f"{found.only_first} against {found.only_second}, McNemar p = {found.p_value:.3g}"
        )


def _title(label: str, records: Records) -> str:
    evaluation = records.evaluation
    masks = evaluation["scoring"]["masks"]
    examples = f"{len(records.rows):,} of {evaluation['dataset']['name']}"
    return f"{label}: {examples}, {masks} scoring masks, 95 % intervals"


def _words(number: object) -> str:
    value, low, high = (getattr(number, name) for name in ("value", "low", "high"))
    return f"{value:.1%} [{low:.1%}, {high:.1%}]"
