"""Curves, histograms and embeddings as figures in one style; nothing here touches matplotlib's global state.

Other modules that draw take matplotlib's classes from here, so that its absence is told in one place.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from menet.errors import require
from menet.evaluation.snapshots import Features
from menet.report.curves import Axis, Series

matplotlib = require("matplotlib", extra="report")

from matplotlib.axes import Axes  # noqa: E402 (after the line that says how to install it)
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import (  # noqa: E402
    FixedFormatter,
    FixedLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

INK, FAINT, GRID = "#1f2933", "#5d6975", "#d9dee3"

PALETTE = ("#2f6db3", "#c8473f", "#2c8a5f", "#a2609f", "#c27c1a", "#4a9aa8", "#7a6a4f", "#5b5fc7")
"""Colors of equal weight that stay apart in print and for most color-blind readers."""

CLASS_COLORS = (
    "#2f6db3", "#c8473f", "#2c8a5f", "#a2609f", "#c27c1a", "#4a9aa8", "#8a7a5a", "#5b5fc7", "#d97fa5", "#6b7682",
)  # fmt: skip
MOST_VECTORS = 600
"""Examples of which features are drawn; distances are of all pairs."""

MARKERS = "osD^vP*X"
DASHES = ("-", "--", ":")

SETTINGS: dict[Any, Any] = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 3.2,
    "lines.linewidth": 2,
    "svg.fonttype": "path",
    "svg.hashsalt": "menet",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the style of the reports inside a `with` block."""
    with matplotlib.rc_context(SETTINGS):
        yield


def sheet(width: float = 4.8, height: float = 3.3) -> Figure:
    """A figure whose text is legible at the width of a phone; call it inside `styled`."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def color(position: int) -> str:
    """The color of the series at `position`."""
    return PALETTE[position % len(PALETTE)]


def line(position: int) -> dict[str, Any]:
    """Color and dashes of the line at `position`; dashes tell lines of the same color apart."""
    return {"color": color(position), "linestyle": DASHES[position // len(PALETTE) % len(DASHES)]}


def marked_line(position: int) -> dict[str, Any]:
    """The same, with a marker at each point."""
    return {**line(position), "marker": MARKERS[position % len(MARKERS)]}


def sweep(axis: Axis, curves: Sequence[Series]) -> Figure:
    """Expected robust accuracy against one setting of the evaluation, with intervals."""
    return _curves(curves, axis.label, logarithmic=axis.logarithmic)


def worst_cases(curves: Sequence[Series]) -> Figure:
    """Robust accuracy over ε, the lowest over attacks at each."""
    return _curves(curves, "ε (pixels in [0,1])", logarithmic=False)


def votes(curves: Sequence[Series]) -> Figure:
    """Robust accuracy of the majority vote against the number of votes."""
    return _curves(curves, "votes", logarithmic=True)


def certified(curves: Sequence[Series]) -> Figure:
    """Certified accuracy against the number of perturbed pixels."""
    with styled():
        figure = sheet()
        place = figure.add_subplot()
        for position, curve in enumerate(curves):
            at, value, low, high = _columns(curve)
            place.step(at, value, where="post", **line(position), label=curve.name)
            place.fill_between(at, low, high, step="post", color=color(position), alpha=0.18, linewidth=0)
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        _percentages(place, "perturbed pixels", "certified accuracy")
        legend(figure, place)
    return figure


def losses(curves: Sequence[Series]) -> Figure:
    """The attack's mean loss by step: it should rise and flatten."""
    with styled():
        figure = sheet()
        place = figure.add_subplot()
        for position, curve in enumerate(curves):
            at, value, _, _ = _columns(curve)
            place.plot(at, value, **line(position), label=curve.name)
        place.set_xlabel("attack steps")
        place.set_ylabel("mean loss")
        legend(figure, place)
    return figure


def t_sne(named: Sequence[tuple[str, Features]], seed: int = 0) -> Figure:
    """t-SNE of the features, one row per model: clean images left, adversarial ones right."""
    from threadpoolctl import threadpool_limits

    TSNE = require("sklearn.manifold", extra="demo").TSNE
    with styled():
        figure = sheet(4.8, 2.5 * len(named) + 0.4)
        places = figure.subplots(len(named), 2, squeeze=False)
        classes: set[int] = set()
        for row, (name, features) in enumerate(named):
            labels = features.labels[:MOST_VECTORS]
            classes |= set(labels.tolist())
            for column, kind in enumerate(("clean", "adversarial")):
                vectors = getattr(features, kind)[:MOST_VECTORS].astype(np.float64)
                perplexity = min(30.0, max(2.0, (len(vectors) - 1) / 3))
                tool = TSNE(perplexity=perplexity, init="pca", random_state=seed, max_iter=500, n_jobs=1)
                # For so few points threads cost more than they bring, and they wait by spinning.
                with threadpool_limits(1):
                    spots = tool.fit_transform(vectors)
                place = places[row, column]
                place.scatter(*spots.T, s=9, c=[_class_color(label) for label in labels.tolist()], linewidths=0)
                place.set_title(f"{plain(name)}\n{kind}", fontsize=10)
                place.set_xticks([])
                place.set_yticks([])
        handles = [places[0, 0].scatter([], [], s=24, c=_class_color(label)) for label in sorted(classes)[:10]]
        names = [str(label) for label in sorted(classes)[:10]]
        narrow = {"columnspacing": 0.7, "handletextpad": 0.05, "handlelength": 1.0}
        figure.legend(handles, names, loc="outside upper left", ncols=10, **narrow)
    return figure


def distances(named: Sequence[tuple[str, Features]]) -> Figure:
    """Empirical CDFs of Euclidean distances between features: within a class solid, between classes dashed."""
    with styled():
        figure = sheet(4.8, 4.6)
        places = figure.subplots(2, 1, sharex=True)
        for place, kind in zip(places, ("clean", "adversarial"), strict=True):
            for position, (name, features) in enumerate(named):
                within, between = _pairs(getattr(features, kind)[:MOST_VECTORS], features.labels[:MOST_VECTORS])
                for values, dashes, word in ((within, "-", "same class"), (between, "--", "other class")):
                    if len(values):
                        at = np.quantile(values, np.linspace(0, 1, 200))
                        place.plot(
                            at, np.linspace(0, 1, 200), dashes, color=color(position), label=f"{name}, {word}"
                        )
            place.set_title(f"{kind} images")
            place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            place.set_ylabel("fraction of pairs")
            place.set_xlim(left=0)
        places[1].set_xlabel("Euclidean distance of features")
        legend(figure, places[0])
    return figure


def rank_histogram(bars: Axes, counts: Sequence[int], title: str, label: str = "approximate rank") -> None:
    """Draw the paper's figure 1 for one dataset: `counts[r]` images have rank r, with their empirical CDF."""
    images = sum(counts)
    red, blue = PALETTE[1], PALETTE[0]
    bars.bar(range(len(counts)), [count / images for count in counts], width=0.85, color=red)
    bars.set_xlim(0.25 if not counts[0] else -0.6, len(counts) - 0.25)
    cumulative = np.cumsum(counts) / images
    curve = bars.twinx()
    curve.step([*range(len(counts)), len(counts)], [*cumulative, 1.0], where="post", color=blue)
    curve.set_ylim(0, 1.03)
    curve.grid(visible=False)
    for place, side, quantity in ((bars, red, "fraction of images"), (curve, blue, "empirical CDF")):
        place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        place.tick_params(axis="y", colors=side)
        place.set_ylabel(quantity, color=side)
    bars.xaxis.set_major_locator(MaxNLocator(integer=True))
    bars.set_xlabel(label)
    bars.set_title(plain(title), fontsize=10)


def legend(figure: Figure, place: Axes, columns: int = 1) -> None:
    """Name the curves of `place` above the axes, where no name can cover a curve.

    Names wider than the figure are wrapped, and the figure grows by the height of the legend.
    """
    handles, names = place.get_legend_handles_labels()
    if not handles:
        return
    width, height = figure.get_size_inches()
    # The font is 10 points: a character takes 0.085 inches on average, the line beside it 0.6.
    most = max(12, int((width / columns - 0.6) / 0.085))
    # Escaped after wrapping, which could tear an escape apart.
    wrapped = [plain("\n".join(textwrap.wrap(name, most))) for name in names]
    figure.legend(handles, wrapped, loc="outside upper left", ncols=columns)
    lines = sum(name.count("\n") + 1 for name in wrapped) / columns
    figure.set_size_inches(width, height + 0.22 * lines)


def plain(text: str) -> str:
    """`text` as it is written: two dollar signs would make it a formula."""
    return text.replace("$", r"\$")


def _curves(curves: Sequence[Series], label: str, *, logarithmic: bool) -> Figure:
    with styled():
        figure = sheet()
        place = figure.add_subplot()
        for position, curve in enumerate(curves):
            at, value, low, high = _columns(curve)
            below, above = np.maximum(value - low, 0), np.maximum(high - value, 0)
            place.errorbar(
                at,
                value,
                yerr=[below, above],
                **marked_line(position),
                markersize=6,
                elinewidth=1.2,
                capsize=3,
                label=curve.name,
            )
        ticks = sorted({point.at for curve in curves for point in curve.points})
        if logarithmic and ticks[0] > 0:
            place.set_xscale("log")
            ticks = _apart(ticks)
            place.xaxis.set_minor_locator(NullLocator())
            place.xaxis.set_major_locator(FixedLocator(ticks))
            place.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
        _percentages(place, label, "robust accuracy")
        legend(figure, place)
    return figure


def _columns(curve: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    table = np.array([(point.at, point.value, point.low, point.high) for point in curve.points], float)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _apart(ticks: list[float]) -> list[float]:
    """The ticks whose labels do not touch on a logarithmic axis."""
    least = (ticks[-1] / ticks[0]) ** (1 / 9)
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if tick / kept[-1] >= least:
            kept.append(tick)
    return kept


def _percentages(place: Axes, label: str, quantity: str) -> None:
    place.set_ylim(-0.02, 1.02)
    place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    place.set_xlabel(label)
    place.set_ylabel(quantity)


def _pairs(vectors: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances of all pairs of one class, and of all pairs of two classes."""
    from scipy.spatial.distance import pdist

    same = np.equal.outer(labels, labels)[np.triu_indices(len(labels), 1)]
    apart = pdist(vectors.astype(np.float64))
    return apart[same], apart[~same]


def _class_color(label: int) -> str:
    return CLASS_COLORS[label % len(CLASS_COLORS)] if label >= 0 else FAINT
