"""The paper's figures, drawn from summaries of experiments."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from menet.errors import RecordError
from menet.evaluation.snapshots import FEATURES_SUFFIX, Features, load_features, unpack
from menet.report import figures
from menet.report.figures import (
    FAINT,
    INK,
    Figure,
    NullLocator,
    PercentFormatter,
    legend,
    marked_line,
    plain,
    rank_histogram,
    sheet,
    styled,
)
from menet.report.pictures import WRONG, Tile, image_grid, psnr

DIFFERENCE_SCALES = (20.0, 10.0, 5.0, 2.0)
"""Factors by which figure 10 may scale both differences."""


def draw(summary: dict[str, Any], root: Path) -> Figure:
    """Draw the figure of a summary; features and images are read from the folders that it names under `root`."""
    if summary["form"] not in FORMS:
        raise RecordError(
            f"unknown form {summary['form']!r:.40} of {summary['name']}; choose from {', '.join(FORMS)}"
        )
    figure = FORMS[summary["form"]](summary, root)
    # A figure may leave its page; the scale that made it goes with it.
    # A letter of this size takes about a seventeenth of an inch.
    width = min(90, int(17 * figure.get_size_inches()[0]))
    words = textwrap.fill(f"scale {summary['scale']}: {summary['scale_summary']}", width)
    figure.supxlabel(words, fontsize=7, color=FAINT)
    return figure


def lines(summary: dict[str, Any], root: Path) -> Figure:
    """Accuracy against steps or p, with intervals; two panels in a row."""
    panels = summary["panels"]
    across = summary["across"]
    columns = min(2, len(panels))
    down = -(-len(panels) // columns)
    with styled():
        figure = sheet(3.9 * columns, 2.9 * down + 0.4)
        places = list(figure.subplots(down, columns, squeeze=False, sharey=True).flat)
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
            place.set_title(plain(panel["title"]))
            place.set_xlabel(f"{across} at the paper's scale" if across == "steps" else across)
            place.set_ylim(-2, 102)
            place.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        for place in places[len(panels) :]:
            place.set_visible(False)
        legend(figure, figure.axes[0], columns)
    return figure


def ranks(summary: dict[str, Any], root: Path) -> Figure:
    """Histogram and empirical CDF of approximate ranks, one panel per dataset."""
    panels = summary["panels"]
    down = -(-len(panels) // 2)
    with styled():
        figure = sheet(7.6, 3.0 * down)
        for number, panel in enumerate(panels, 1):
            (found,) = panel["sources"].values()
            measured, shown = (name.lower().replace("-", "") for name in (found["dataset"], panel["title"]))
            other = "" if measured in shown else f" (here {found['dataset']})"
            title = f"{panel['title']}{other}, {found['images']:,} images"
            rank_histogram(figure.add_subplot(down, 2, number), found["histogram"], title)
    return figure


def reconstructions(summary: dict[str, Any], root: Path) -> Figure:
    """For each image two rows, masked and estimated, with one column per p; the original comes first."""
    (found,) = summary["panels"][0]["sources"].values()
    rows: list[list[Tile | None]] = []
    for number, original in enumerate(found["originals"]):
        rows.append([Tile(unpack(original), "original")])
        rows.append([None])
        for column in found["columns"]:
            rows[-2].append(Tile(unpack(column["masked"][number]), f"p = {column['p']:g}"))
            rows[-1].append(Tile(unpack(column["estimate"][number]), "", psnr(column["error"][number])))
    return image_grid(rows)


def plane(summary: dict[str, Any], root: Path) -> Figure:
    """t-SNE of the features before the last layer."""
    return figures.t_sne(_vectors(summary, root))


def distances(summary: dict[str, Any], root: Path) -> Figure:
    """Empirical CDFs of distances within and between classes."""
    return figures.distances(_vectors(summary, root))


def pictures(summary: dict[str, Any], root: Path) -> Figure:
    """Clean image, adversarial image and their difference, then the same three of the estimates.

    Both differences are scaled by one factor, so that they compare; gray is zero.
    """
    (found,) = summary["panels"][0]["sources"].values()
    names = found["class_names"]
    rows: list[list[Tile | None]] = []
    pairs = [
        tuple(
            unpack(example[f"adversarial{end}"]["image"]) - unpack(example[f"clean{end}"]["image"])
            for end in ("", "_seen")
        )
        for example in found["examples"]
    ]
    most = max(float(one.abs().max()) for pair in pairs for one in pair)
    factor = next((one for one in DIFFERENCE_SCALES if one * most <= 0.5), 1.0)
    for number, (example, differences) in enumerate(zip(found["examples"], pairs, strict=True)):
        rows.append([])
        for end, difference in zip(("", "_seen"), differences, strict=True):
            for kind in ("clean", "adversarial"):
                answer = example[kind + end]
                caption = f"{names[answer['prediction']]:.12s} {answer['probability']:.0%}"
                title = "" if number else kind + (",\nestimated" if end else "")
                wrong = answer["prediction"] != example["label"]
                rows[-1].append(Tile(unpack(answer["image"]), title, caption, WRONG if wrong else INK))
            title = "" if number else f"difference ×{factor:g}"
            rows[-1].append(Tile(0.5 + factor * difference, title, f"ℓ∞ {float(difference.abs().max()):.3f}"))
    return image_grid(rows, inches=1.28, font=10)


def diagram(summary: dict[str, Any], root: Path) -> Figure:
    """Training above, inference below: an image is masked, estimated, and classified."""
    (found,) = summary["panels"][0]["sources"].values()
    original = unpack(found["originals"][0])
    columns = found["columns"]
    middle = columns[len(columns) // 2]
    side, arrow = 1.2, {"arrowstyle": "->", "color": INK}
    with styled():
        figure = sheet(8.0, 4.2)
        place = figure.add_subplot()
        place.set_axis_off()
        for words, low, shown, steps, result in (
            ("training", 2.1, columns, ("n masks,\np₁ … pₙ", "matrix\nestimation", "train on\nall n"), "loss"),
            ("inference", 0.0, [middle], ("one mask,\nmean p", "matrix\nestimation", "classify"), "label"),
        ):
            center = low + side / 2
            place.text(0, low + side + 0.3, words, fontsize=11, weight="bold")
            _tile(place, original, 0, low, side, "image X")
            for position, column in enumerate(shown):
                size = side / len(shown) - (0.05 if len(shown) > 1 else 0)
                at = low + side - (position + 1) * side / len(shown)
                p = f"p = {column['p']:g}"
                _tile(place, unpack(column["masked"][0]), 2.3, at, size, "" if size < side else p)
                _tile(place, unpack(column["estimate"][0]), 4.6, at, size, "")
                if size < side:
                    place.text(2.3 + size + 0.08, at + size / 2, p, fontsize=8, va="center")
            for left, right, step in zip((1.3, 3.6, 5.9), (2.2, 4.5, 6.6), steps, strict=True):
                place.annotate("", (right, center), (left, center), arrowprops=arrow)
                place.text((left + right) / 2, center + 0.08, step, fontsize=8, ha="center")
            box = {"facecolor": "#eeeeee", "edgecolor": INK, "boxstyle": "square,pad=0.5"}
            place.text(7.1, center, "network N", fontsize=9, ha="center", va="center", bbox=box)
            place.annotate("", (8.05, center), (7.6, center), arrowprops=arrow)
            place.text(8.1, center, result, fontsize=9, va="center")
        # After the images, each of which would set limits of its own.
        place.set(xlim=(-0.05, 8.5), ylim=(-0.1, 3.75), aspect="equal")
    return figure


def _tile(place: Any, image: Tensor, left: float, low: float, side: float, title: str) -> None:
    pixels = image.clamp(0, 1).numpy()
    shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    place.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=(left, left + side, low, low + side), zorder=2)
    place.text(left + side / 2, low + side + 0.05, title, fontsize=8, ha="center")


def _vectors(summary: dict[str, Any], root: Path) -> list[tuple[str, Features]]:
    named = []
    for panel in summary["panels"]:
        for name, found in panel["sources"].items():
            (file,) = (root / found["folder"]).glob(f"*{FEATURES_SUFFIX}")
            named.append((name, load_features(file)))
    return named


FORMS: dict[str, Callable[[dict[str, Any], Path], Figure]] = {
    "lines": lines,
    "ranks": ranks,
    "reconstructions": reconstructions,
    "plane": plane,
    "distances": distances,
    "pictures": pictures,
    "diagram": diagram,
}
