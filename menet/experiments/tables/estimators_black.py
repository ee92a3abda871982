"""CIFAR-10: the estimators under black-box attacks (appendix)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, black_box, model
from menet.experiments.plan import Table
from menet.experiments.tables.estimators import ESTIMATORS


def plan() -> Table:
    columns = ("Clean", *rows.GRADIENT)
    cells = rows.attacked("Vanilla", model("cifar10", "vanilla"), columns, black_box)
    for name, estimator in ESTIMATORS.items():
        victim = model("cifar10", p=HIGH, estimator=estimator)
        cells += rows.attacked(f"ME-Net - {name} · Prep.", victim, columns, black_box)
    return Table("table23", "CIFAR-10, estimators, black-box", cells, "appendix me methods black")
