"""MNIST: the adversary has the network, and does not know of the preprocessing."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, LOWEST, MIDDLE, gray_box, model
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    for p in (HIGH, MIDDLE, LOW, LOWEST):
        row, victim = f"ME-Net · {rows.words(p)}", model("mnist", p=p)
        cells += rows.attacked(row, victim, rows.GRADIENT_MNIST, gray_box)
    return Table("table15", "MNIST, gray-box", cells, "appendix mnist gray")
