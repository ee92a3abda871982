"""CIFAR-10 under many black-box attacks (main text)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, black_box, model
from menet.experiments.plan import Table


def plan() -> Table:
    columns = ("CW", "FGSM", "PGD 7", "PGD 20", "PGD 40", "Boundary", "SPSA")
    cells = rows.attacked("Vanilla", model("cifar10", "vanilla"), columns, black_box)
    cells += rows.attacked("ME-Net", model("cifar10", p=HIGH), columns, black_box)
    return Table("table2", "CIFAR-10, black-box, many attacks", cells, "cifar black ours")
