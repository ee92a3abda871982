"""MNIST under black-box attacks."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, LOWEST, MIDDLE, black_box, model
from menet.experiments.plan import Table


def plan() -> Table:
    columns = ("Clean", *rows.BLACK_MNIST)
    cells = rows.attacked("Vanilla", model("mnist", "vanilla"), columns, black_box)
    cells += rows.attacked("Madry", model("mnist", "madry"), ("Clean", *rows.GRADIENT_MNIST), black_box)
    cells += rows.attacked("Thermometer", model("mnist", "thermometer"), ("Clean", "PGD 40"), black_box)
    for p in (HIGH, MIDDLE, LOW, LOWEST):
        cells += rows.attacked(f"ME-Net · {rows.words(p)}", model("mnist", p=p), columns, black_box)
    return Table("table14", "MNIST, black-box", cells, "appendix mnist black")
