"""`menet data list`, `fetch`, `import`, `verify` and `rank`: getting datasets, and a look at them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from menet.commands import Csv, Json, Latex, Output, printing
from menet.commands.options import Root, Side, SkipUnreadable, Split
from menet.errors import ConfigurationError

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class DataList:
    """List the datasets: whether they are installed, their size and their license."""

    root: Root = None

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from rich.console import Console

        from menet.data import SOURCES
        from menet.data.dataset import data_folder
        from menet.report import Table

        place = data_folder(self.root)
        columns = ("name", "installed", "images", "classes", "size", "license")
        rows = tuple(_row(source, place / source.name) for source in SOURCES.values())
        out.table(Table("", columns, rows), lines=False)
        out.value(folder=place)
        Console(highlight=False).print(
            f"\nEach dataset has a folder in {place} (set MENET_DATA to use another folder).\n"
            "Images: training+test as published; menet data verify NAME compares.\n"
            "Get one with menet data fetch NAME, or menet data import NAME PATH if you have its files.",
            soft_wrap=True,
        )
        return 0


@dataclass(frozen=True)
class DataFetch:
    """Download a dataset from its publisher. Safe to interrupt: rerun the same command to resume."""

    name: Name
    """mnist, cifar10, svhn or tiny-imagenet."""

    root: Root = None

    replace: bool = False
    """Replace the files that are already there."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet import data
        from menet.data import install

        source = data.source(self.name)
        place = install.fetch(source, self.root, self.replace)
        out.value(folder=place, license=source.license)
        print(f"{self.name}: {place} (terms: {source.license})")
        return 0


@dataclass(frozen=True)
class DataImport:
    """Copy a dataset's files into place, from the publisher's archive or from a folder that has them.

    Files that differ from the publisher's are imported too if they can be read, with a warning.
    """

    name: Name
    """mnist, cifar10, svhn, tiny-imagenet or folder (any folder with one subfolder of images per class)."""

    path: Annotated[Path, tyro.conf.Positional]
    """The archive, or the folder to search."""

    root: Root = None

    replace: bool = False
    """Replace the files that are already there."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet import data
        from menet.data import install

        source = data.source(self.name)
        place = install.take(source, self.path, self.root, self.replace)
        out.value(folder=place)
        print(f"{self.name}: {place}")
        if source.versions:
            DataVerify(self.name, self.root)()
        return 0


@dataclass(frozen=True)
class DataVerify:
    """Compare a dataset with its publisher's checksums, reading every byte. The exit code is 1 if it differs."""

    name: Name
    """mnist, cifar10, svhn or tiny-imagenet."""

    root: Root = None

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet import data
        from menet.data import place_of
        from menet.data.dataset import require_file
        from menet.data.published import Checksums
        from menet.errors import DataError
        from menet.report import Cell, Table

        source = data.source(self.name)
        if not source.versions:
            raise DataError(f"{self.name} has no publisher's checksums to compare with")
        place = require_file(place_of(self.name, self.root), self.name)
        checksums = Checksums(place, remember=False)
        files = source.version(place)
        exact = []
        rows = []
        for file in files:
            exact.append(checksums.is_exact(file))
            here = (place / file.path).exists() or (place / file.path).with_suffix("").exists()
            verdict = "as published" if exact[-1] else "differs from what was published" if here else "missing"
            if here and not exact[-1] and file.is_folder:
                verdict = "not known to be as published (only a folder unpacked by menet from the archive is)"
            rows.append((Cell(file.path), Cell(verdict)))
        whole = all(exact)
        out.table(Table("", ("file", "verdict"), tuple(rows)), lines=False)
        out.value(as_published=whole)
        print(f"{self.name}: {'exactly' if whole else 'not exactly'} what its publisher offers")
        return 0 if whole else 1


@dataclass(frozen=True)
class DataRank:
    """Draw the histogram and the CDF of the approximate rank of a dataset's images (figure 1 of the paper).

    The approximate rank is the fewest singular values of the matrix `[R G B]` that hold 90% of its energy.
    """

    name: Name
    """digits, mnist, cifar10, svhn, tiny-imagenet, or folder:PATH."""

    split: Split = "test"

    energy: float = 0.9
    """Fraction of the energy (the sum of squared singular values) to hold."""

    limit: int | None = None
    """Number of images, from the first one on. Default: all."""

    side: Side = None

    skip_unreadable: SkipUnreadable = False

    root: Root = None

    out: Path = Path("runs/rank")
    """Folder for NAME-SPLIT.png and NAME-SPLIT.json."""

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        if not 0 < self.energy <= 1:
            raise ConfigurationError(f"expected 0 < energy <= 1, got {self.energy}")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"expected limit >= 1, got {self.limit}")
        from menet.commands.options import check_dataset
        from menet.data import load
        from menet.experiments.measures import ranks_of
        from menet.files import replacing, write_atomically
        from menet.report.figures import rank_histogram, sheet, styled

        dataset = load(check_dataset(self.name, self.side, self.skip_unreadable), self.split, self.root)
        count = min(len(dataset), self.limit or len(dataset))
        ranks = ranks_of(dataset, count, self.energy)
        _, channels, height, width = dataset.images.shape
        numbers = RankNumbers.of(dataset, ranks, (height, channels * width), self.energy)
        picture = self.out / f"{dataset.name}-{self.split}.png"
        with styled():
            figure = sheet(6.0, 3.8)
            title = f"{dataset.name}, {len(ranks):,} {dataset.split} images of {height}×{width}"
            label = f"approximate rank ({self.energy:.0%} of the energy)"
            rank_histogram(figure.add_subplot(), numbers.histogram, title, label)
            with replacing(picture) as temporary:
                figure.savefig(temporary, format="png", dpi=160)
        write_atomically(picture.with_suffix(".json"), json.dumps(asdict(numbers), indent=1))
        out.value(**asdict(numbers), picture=picture)
        print(numbers.text())
        out.table(numbers.table(), lines=False)
        print(f"picture: {picture}")
        return 0


@dataclass(frozen=True)
class RankNumbers:
    """The figure in numbers: `histogram[r]` images have rank r, the fraction `cumulative[r]` at most r."""

    dataset: str
    split: str
    images: int
    matrix: tuple[int, int]
    energy: float
    mean: float
    median: int
    percentile_90: int
    largest: int
    histogram: list[int]
    cumulative: list[float]

    @classmethod
    def of(cls, dataset: Any, ranks: Any, matrix: tuple[int, int], energy: float) -> "RankNumbers":
        """Count the ranks, a vector of integers, of a dataset's images."""
        histogram = ranks.bincount()
        return cls(
            dataset=dataset.name,
            split=dataset.split,
            images=len(ranks),
            matrix=matrix,
            energy=energy,
            mean=ranks.double().mean().item(),
            median=int(ranks.median()),
            percentile_90=int(ranks.double().quantile(0.9, interpolation="higher")),
            largest=int(ranks.max()),
            histogram=histogram.tolist(),
            cumulative=(histogram.double().cumsum(0) / len(ranks)).tolist(),
        )

    def text(self) -> str:
        """The numbers as lines to read."""
        height, width = self.matrix
        return "\n".join(
            [
                f"{self.dataset} {self.split}: {self.images:,} images as {height}×{width} matrices",
                f"approximate rank: mean {self.mean:.2f}, median {self.median}, "
                f"90% of images at most {self.percentile_90}, largest {self.largest}",
            ]
        )

    def table(self) -> Any:
        """How many images have each rank, and which fraction has at most that."""
        from menet.report import Cell, Table

        rows = tuple(
            tuple(Cell(text, number=True) for text in (str(rank), f"{count:,}", f"{fraction:.2%}"))
            for rank, (count, fraction) in enumerate(zip(self.histogram, self.cumulative, strict=True))
            if count
        )
        return Table("", ("rank", "images", "at most"), rows)


def _row(source: Any, place: Path) -> tuple[Any, ...]:
    from menet.report import Cell

    here = place.is_dir() and not source.embedded
    size = (
        sum(os.path.getsize(Path(at) / name) for at, _, names in os.walk(place) for name in names) if here else 0
    )
    return (
        Cell(source.name),
        Cell("built in" if source.embedded else "yes" if here else "no"),
        Cell("+".join(f"{count:,}" for count in source.images) if source.images else "any", number=True),
        Cell(str(source.classes or "any"), number=True),
        Cell(f"{size / 1e6:,.0f} MB" if here else "", number=True),
        Cell(source.license),
    )
