"""CIFAR-10: the white-box adversary attacks only what comes after the preprocessing."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, after_preprocessing, model
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    for p in (HIGH, MIDDLE, LOW):
        row, victim = f"ME-Net · {rows.words(p)}", model("cifar10", p=p)
        cells += rows.attacked(row, victim, rows.GRADIENT, after_preprocessing)
        cells += rows.beyond(row, victim, 40)
    return Table("table12", "CIFAR-10, preprocessing not attacked", cells, "appendix cifar white pure add")
