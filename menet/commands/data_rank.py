"""`menet data rank`: how low the rank of a dataset's images is (the paper's figure 1)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import torch
import tyro
from jaxtyping import Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from menet.data import Dataset, load
from menet.errors import ConfigurationError
from menet.experiments.measures import ranks_of
from menet.files import replacing, write_atomically

RED, BLUE = "#c8473f", "#2f6db3"


@dataclass(frozen=True)
class DataRank:
    """Draw the histogram and the distribution of the approximate rank of a dataset's images (figure 1).

    The approximate rank is the fewest singular values of the matrix `[R G B]` that hold 90 % of its energy.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """digits, mnist, cifar10, svhn, tiny-imagenet, or folder:PATH."""

    split: str = "test"
    """train or test."""

    energy: float = 0.9
    """Share of the energy (the sum of squared singular values) to hold."""

    limit: int | None = None
    """Use only so many images from the start."""

    side: int | None = None
    """Scale and crop to this size (folder only)."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    out: Path = Path("runs/rank")
    """Folder for NAME-SPLIT.png and NAME-SPLIT.json."""

    def __call__(self) -> int:
        if not 0 < self.energy <= 1:
            raise ConfigurationError(f"energy is {self.energy}; it must be above 0 and at most 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"limit is {self.limit}; it must be 1 or more")
        dataset = load(self.name, self.split, self.root, side=self.side)
        count = min(len(dataset), self.limit or len(dataset))
        ranks = ranks_of(dataset, count, self.energy)
        numbers = RankNumbers.of(dataset, ranks, self.energy)
        picture = self.out / f"{dataset.name}-{self.split}.png"
        with replacing(picture) as temporary:
            draw(dataset, ranks, self.energy).savefig(temporary, format="png", dpi=160)
        write_atomically(picture.with_suffix(".json"), json.dumps(asdict(numbers), indent=1))
        print(numbers.text())
        print(f"picture: {picture}")
        return 0


@dataclass(frozen=True)
class RankNumbers:
    """The figure in numbers: `histogram[r]` images have rank r, the share `cumulative[r]` has at most r."""

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
    def of(cls, dataset: Dataset, ranks: Int[Tensor, " n"], energy: float) -> "RankNumbers":
        """Count the ranks of a dataset's images."""
        _, channels, height, width = dataset.images.shape
        histogram = ranks.bincount()
        return cls(
            dataset=dataset.name,
            split=dataset.split,
            images=len(ranks),
            matrix=(height, channels * width),
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
            f"{rank:>4}  {count:>6,}  {share:>7.2%}"
            for rank, (count, share) in enumerate(zip(self.histogram, self.cumulative, strict=True))
            if count
        ]
        return "\n".join(
            [
                f"{self.dataset} {self.split}: {self.images:,} images as {height}×{width} matrices",
                f"approximate rank: mean {self.mean:.2f}, median {self.median}, "
                f"90 % of images at most {self.percentile_90}, largest {self.largest}",
                "rank  images  at most",
                *rows,
            ]
        )


def draw(dataset: Dataset, ranks: Int[Tensor, " n"], energy: float) -> Figure:
    """The paper's figure 1 for one dataset: histogram in red, empirical CDF in blue."""
    shares = (ranks.bincount() / len(ranks)).tolist()
    cumulative = torch.tensor(shares).cumsum(0).tolist()
    positions = list(range(len(shares)))
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False}):
        figure = Figure(figsize=(6.0, 3.8), layout="constrained")
        bars = figure.add_subplot()
        bars.bar(positions, shares, width=0.85, color=RED, alpha=0.85)
        bars.set_xlabel(f"approximate rank ({energy:.0%} of the energy)")
        bars.set_ylabel("share of images", color=RED)
        bars.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        bars.xaxis.set_major_locator(MaxNLocator(integer=True))
        bars.set_xlim(0.25 if not shares[0] else -0.6, len(shares) - 0.25)
        curve = bars.twinx()
        curve.step([*positions, len(shares)], [*cumulative, 1.0], where="post", color=BLUE, linewidth=2)
        curve.set_ylabel("empirical CDF", color=BLUE)
        curve.set_ylim(0, 1.03)
        bars.tick_params(axis="y", colors=RED)
        curve.tick_params(axis="y", colors=BLUE)
        side = "×".join(map(str, dataset.images.shape[2:]))
        bars.set_title(f"{dataset.name}, {len(ranks):,} {dataset.split} images of {side}", loc="left")
    return figure
