"""`menet certify`: how many pixels may be changed without turning the vote over masks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from menet.commands.subjects import dataset_of, default_folder, device_of, model_of
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.evaluation import CertificateSettings, Records, Worker, certified_accuracies, certify


@dataclass(frozen=True)
class Certify:
    """Certify the vote of a ME-Net example by example: no change of so many pixels can turn it.

    It is a certificate in the number of changed pixels, strong where few are observed (small p) and none at
    p ≥ 0.5. Stopped at any time and started again, it goes on where it was.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder or weights file of `menet train`, or package.module:factory."""

    data: str | None = None
    """digits, mnist, cifar10, svhn, tiny-imagenet or a folder of images; by default that of the training."""

    split: str = "test"
    """train or test."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    p: float | None = None
    """Observe pixels with this probability, in place of the run's own."""

    start: int = 0
    """First example."""

    stop: int | None = 500
    """One past the last example; more than there are means all."""

    selection: int = 100
    """Masks by which the class is chosen."""

    estimation: int = 1000
    """Masks by which its share of the vote is bounded."""

    alpha: float = 0.001
    """How likely a certificate may be wrong."""

    batch: int = 20
    """Examples at a time; at most this many are lost when it is killed."""

    rows: int = 512
    """Most images in one forward pass: less memory when smaller."""

    seed: int = 0
    """All randomness comes from it."""

    device: str = "cpu"
    """cpu, cuda, …"""

    out: Path | None = None
    """Folder for the rows; RUN/certificate, or RUN/certificate-P with another p, if not given."""

    def __call__(self) -> int:
        model, source = model_of(self.run)
        if not isinstance(model, MENet):
            raise ConfigurationError(f"{self.run} is a {type(model).__name__}; certificates need a ME-Net")
        if self.p is not None:
            model = MENet(model.classifier, model.estimator, self.p, model.masks, model.channels).eval()
        dataset = dataset_of(self.data, self.run, self.split, self.root)
        settings = CertificateSettings(
            start=self.start,
            stop=None if self.stop is None else min(self.stop, len(dataset)),
            batch=self.batch,
            selection=self.selection,
            estimation=self.estimation,
            alpha=self.alpha,
            seed=self.seed,
            rows=self.rows,
        )
        folder = self.out or default_folder(self.run, "certificate" + ("" if self.p is None else f"-{self.p:g}"))
        place = Worker.from_environment()
        records = certify(
            model, dataset, folder, settings, source=source, device=device_of(self.device), place=place
        )
        if records.missing:
            print(f"process {place.rank} is done; {len(records.missing)} rows are still being made by others")
            return 0
        show(records)
        print(f"rows: {folder}")
        return 0


def show(records: Records) -> None:
    """Print the certified accuracy at each radius."""
    evaluation = records.evaluation
    abstained = sum(row["radius"] < 0 for row in records.rows)
    table = Table(
        title=f"certified: {len(records.rows):,} of {evaluation['dataset']['name']}, p = {evaluation['p']:.3g}, "
        f"{abstained} abstentions, each certificate wrong with probability ≤ {evaluation['alpha']:g}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("changed pixels", justify="right")
    table.add_column("certified accuracy (95 % interval)", justify="right")
    for radius, number in certified_accuracies(records).items():
        table.add_row(str(radius), f"{number.value:.1%} [{number.low:.1%}, {number.high:.1%}]")
    Console().print(table)
