"""`menet data rank`: the approximate rank of a dataset's images (the paper's figure 1)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from menet.commands.choices import Root, Side, Split
from menet.errors import ConfigurationError


@dataclass(frozen=True)
class DataRank:
    """Draw the histogram and the CDF of the approximate rank of a dataset's images (figure 1 of the paper).

    The approximate rank is the fewest singular values of the matrix `[R G B]` that hold 90% of its energy.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """digits, mnist, cifar10, svhn, tiny-imagenet, or folder:PATH."""

    split: Split = "test"

    energy: float = 0.9
    """Fraction of the energy (the sum of squared singular values) to hold."""

    limit: int | None = None
    """Number of images, from the first one on. Default: all."""

    side: Side = None

    root: Root = None

    out: Path = Path("runs/rank")
    """Folder for NAME-SPLIT.png and NAME-SPLIT.json."""

    def __call__(self) -> int:
        if not 0 < self.energy <= 1:
            raise ConfigurationError(f"expected 0 < energy <= 1, got {self.energy}")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"expected limit >= 1, got {self.limit}")
        from menet.commands.loading import check_dataset
        from menet.data import load
        from menet.experiments.measures import ranks_of
        from menet.files import replacing, write_atomically
        from menet.report.figures import rank_histogram, sheet, styled

        dataset = load(check_dataset(self.name), self.split, self.root, side=self.side)
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
        print(numbers.text())
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
        rows = [
            f"{rank:>4}  {count:>6,}  {fraction:>7.2%}"
            for rank, (count, fraction) in enumerate(zip(self.histogram, self.cumulative, strict=True))
            if count
        ]
        return "\n".join(
            [
                f"{self.dataset} {self.split}: {self.images:,} images as {height}×{width} matrices",
                f"approximate rank: mean {self.mean:.2f}, median {self.median}, "
                f"90% of images at most {self.percentile_90}, largest {self.largest}",
                "rank  images  at most",
                *rows,
            ]
        )
