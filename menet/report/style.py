"""How every figure looks: one palette, one font size, and no state shared with other users of matplotlib."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, FAINT, GRID = "#1f2933", "#5d6975", "#d9dee3"

PALETTE = ("#2f6db3", "#c8473f", "#2c8a5f", "#a2609f", "#c27c1a", "#4a9aa8", "#7a6a4f", "#5b5fc7")
"""Colours of equal weight that stay apart in print and for most colour-blind readers."""

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
    """Draw in the house's style for the length of a `with` block."""
    with matplotlib.rc_context(SETTINGS):
        yield


def sheet(width: float = 4.8, height: float = 3.3) -> Figure:
    """A figure whose text is legible at the width of a phone; call it inside `styled`."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def colour(position: int) -> str:
    """The colour of the series at `position`."""
    return PALETTE[position % len(PALETTE)]


def line(position: int) -> dict[str, Any]:
    """How the line at `position` in a figure is drawn; dashes tell those apart whose colours come round again."""
    return {"color": colour(position), "linestyle": DASHES[position // len(PALETTE) % len(DASHES)]}


def marked_line(position: int) -> dict[str, Any]:
    """The same with a marker at each point."""
    return {**line(position), "marker": MARKERS[position % len(MARKERS)]}
