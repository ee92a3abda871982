"""Tiny-ImageNet: the adversary has the network, and does not know of the preprocessing."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, gray_box, model
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    for p in (HIGH, MIDDLE, LOW):
        row, victim = f"ME-Net · {rows.words(p)}", model("tiny-imagenet", p=p)
        cells += rows.attacked(row, victim, rows.GRADIENT, gray_box)
    return Table("table21", "Tiny-ImageNet, gray-box", cells, "appendix timgnet gray")
