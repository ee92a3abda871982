"""The paper's figures from summaries of experiments, one drawing for each form."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from menet.errors import RecordError
from menet.evaluation import read_folder
from menet.evaluation.features import SUFFIX, Features, load_features
from menet.evaluation.pictures import unpack
from menet.report import embedding
from menet.report.pictures import portraits
from menet.report.reconstruction import show_image
from menet.report.style import FAINT, colour, marked_line, sheet, styled

BLUE, RED = 0, 1


def draw(summary: dict[str, Any], root: Path) -> Figure:
    """The figure that a summary is of; vectors and images are read from the folders it names under `root`."""
    if summary["form"] not in FORMS:
        raise RecordError(f"{summary['name']} has the form {summary['form']!r:.40}; known are {', '.join(FORMS)}")
    figure = FORMS[summary["form"]](summary, root)
    # A picture leaves its page; what made it must go with it.
    figure.supxlabel(
        textwrap.fill(f"scale {summary['scale']}: {summary['scale_summary']}", 90), fontsize=7, color=FAINT
    )
    return figure


def lines(summary: dict[str, Any], root: Path) -> Figure:
    """Accuracy against steps or p, with intervals; panels side by side, two in a row."""
    panels = summary["panels"]
    across = summary["across"]
    columns = min(2, len(panels))
    down = -(-len(panels) // columns)
    with styled():
        figure = sheet(3.9 * columns, 2.9 * down + 0.8)
        places = figure.subplots(down, columns, squeeze=False, sharey=True).flat
        for place, panel in zip(places, panels, strict=False):
            for position, curve in enumerate(panel["curves"]):
                points = curve["points"]
                value = [point["value"] for point in points]
                below = [max(0.0, point["value"] - point["low"]) for point in points]
                above = [max(0.0, point["high"] - point["value"]) for point in points]
                place.errorbar(
                    [point["x"] for point in points],
                    value,
                    yerr=[below, above],
                    **marked_line(position),
                    markersize=5,
                    elinewidth=1,
                    capsize=2,
                    label=curve["name"],
                )
            ticks = sorted({point["x"] for curve in panel["curves"] for point in curve["points"]})
            if across == "steps":
                place.set_xscale("log")
                place.xaxis.set_minor_locator(NullLocator())
            place.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            place.set_title(panel["title"])
            place.set_xlabel(f"{across} at the scale of the paper" if across == "steps" else across)
            place.set_ylim(-2, 102)
            place.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        for place in list(places)[len(panels) :]:
            place.set_visible(False)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=min(3, len(names)))
    return figure


def ranks(summary: dict[str, Any], root: Path) -> Figure:
    """Histogram and empirical CDF of approximate ranks, a panel for each dataset."""
    panels = summary["panels"]
    with styled():
        figure = sheet(7.6, 3.0 * -(-len(panels) // 2))
        for number, panel in enumerate(panels, 1):
            (found,) = panel["sources"].values()
            counts, images = found["histogram"], found["images"]
            bars = figure.add_subplot(-(-len(panels) // 2), 2, number)
            bars.bar(range(len(counts)), [count / images for count in counts], width=0.85, color=colour(RED))
            curve = bars.twinx()
            shares = [sum(counts[: rank + 1]) / images for rank in range(len(counts))]
            curve.step([*range(len(counts)), len(counts)], [*shares, 1.0], where="post", color=colour(BLUE))
            curve.set_ylim(0, 1.03)
            curve.grid(False)
            for place, side in ((bars, RED), (curve, BLUE)):
                place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
                place.tick_params(axis="y", colors=colour(side))
            bars.xaxis.set_major_locator(MaxNLocator(integer=True))
            bars.set_xlabel("approximate rank")
            same = "" if found["dataset"] in panel["title"].lower() else f" (here {found['dataset']})"
            bars.set_title(f"{panel['title']}{same}, {images:,} images", fontsize=10)
    return figure


def reconstructions(summary: dict[str, Any], root: Path) -> Figure:
    """For each image two rows, masked and estimated, a column for each p; the original first."""
    (found,) = summary["panels"][0]["sources"].values()
    originals, columns = found["originals"], found["columns"]
    with styled():
        figure = sheet(1.05 * (len(columns) + 1), 2.4 * len(originals) + 0.3)
        places = figure.subplots(2 * len(originals), len(columns) + 1, squeeze=False)
        for number, original in enumerate(originals):
            top, bottom = places[2 * number], places[2 * number + 1]
            show_image(top[0], unpack(original))
            bottom[0].set_visible(False)
            top[0].set_title("original", fontsize=9, loc="center")
            for place, below, column in zip(top[1:], bottom[1:], columns, strict=True):
                show_image(place, unpack(column["masked"][number]))
                show_image(below, unpack(column["estimate"][number]))
                place.set_title(f"p = {column['p']:g}", fontsize=9, loc="center")
                below.set_xlabel(f"error {column['error'][number]:.3f}", fontsize=8, labelpad=2, color=FAINT)
    return figure


def plane(summary: dict[str, Any], root: Path) -> Figure:
    """t-SNE of the vectors before the last layer."""
    return embedding.t_sne(_vectors(summary, root))


def distances(summary: dict[str, Any], root: Path) -> Figure:
    """Empirical CDFs of distances within and among classes."""
    return embedding.distances(_vectors(summary, root))


def pictures(summary: dict[str, Any], root: Path) -> Figure:
    """Clean, adversarial, their difference, and what the estimator makes of them."""
    (found,) = summary["panels"][0]["sources"].values()
    (records,) = read_folder(root / found["folder"] / "records").values()
    figure = portraits(records)
    if figure is None:
        raise RecordError(f"{found['folder']} kept no pictures")
    return figure


def _vectors(summary: dict[str, Any], root: Path) -> list[tuple[str, Features]]:
    named = []
    for panel in summary["panels"]:
        for name, found in panel["sources"].items():
            (file,) = (root / found["folder"]).glob(f"*{SUFFIX}")
            named.append((name, load_features(file)))
    return named


FORMS: dict[str, Callable[[dict[str, Any], Path], Figure]] = {
    "lines": lines,
    "ranks": ranks,
    "reconstructions": reconstructions,
    "plane": plane,
    "distances": distances,
    "pictures": pictures,
}
