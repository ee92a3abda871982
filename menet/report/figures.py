"""Figures as pure functions of what was stored; none touches matplotlib's global state."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from menet.report.series import Axis, Series
from menet.report.style import colour, line, marked_line, sheet, styled


def sweep(axis: Axis, curves: Sequence[Series]) -> Figure:
    """Expected accuracy against one number of the evaluation, each point with its interval."""
    return _curves(curves, axis.label, logarithmic=axis.logarithmic)


def votes(curves: Sequence[Series]) -> Figure:
    """Accuracy of the vote against the number of masks that vote."""
    return _curves(curves, "masks that vote", logarithmic=True)


def certified(curves: Sequence[Series]) -> Figure:
    """Certified accuracy against the number of pixels that an adversary may change."""
    with styled():
        figure = sheet()
        place = figure.add_subplot()
        for position, curve in enumerate(curves):
            at, value, low, high = _columns(curve)
            place.step(at, value, where="post", **line(position), label=curve.name)
            place.fill_between(at, low, high, step="post", color=colour(position), alpha=0.18, linewidth=0)
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        _shares(place, "changed pixels", "right and proven")
        _legend(figure, place, len(curves))
    return figure


def losses(curves: Sequence[Series]) -> Figure:
    """The attack's mean loss by step: it should rise, and flatten."""
    with styled():
        figure = sheet()
        place = figure.add_subplot()
        for position, curve in enumerate(curves):
            at, value, _, _ = _columns(curve)
            place.plot(at, value, **line(position), label=curve.name)
        place.set_xlabel("steps of the attack")
        place.set_ylabel("mean loss")
        _legend(figure, place, len(curves))
    return figure


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
        _shares(place, label, "accuracy")
        _legend(figure, place, len(curves))
    return figure


def _columns(curve: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    table = np.array([(point.at, point.value, point.low, point.high) for point in curve.points], float)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _apart(ticks: list[float]) -> list[float]:
    """Those of the ticks whose labels do not touch on a logarithmic axis."""
    least = (ticks[-1] / ticks[0]) ** (1 / 9)
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if tick / kept[-1] >= least:
            kept.append(tick)
    return kept


def _shares(place: Axes, label: str, quantity: str) -> None:
    place.set_ylim(-0.02, 1.02)
    place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    place.set_xlabel(label)
    place.set_ylabel(quantity)


def _legend(figure: Figure, place: Axes, count: int) -> None:
    """Name the curves above the axes, where no name can cover a curve."""
    if count:
        figure.legend(*place.get_legend_handles_labels(), loc="outside upper left", ncols=1)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.22 * count)
