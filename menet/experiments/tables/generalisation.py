"""Accuracy on clean images, four datasets (main text)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, Schedule, model
from menet.experiments.plan import NAMES, Cell, Table

BEST: dict[str, Schedule] = {"mnist": LOW, "cifar10": HIGH, "svhn": HIGH, "tiny-imagenet": MIDDLE}
"""The schedule with the highest clean accuracy under adversarial training."""


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    for dataset, name in NAMES.items():
        cells += (
            rows.clean_cell("Vanilla · Pure", name, model(dataset, "vanilla")),
            rows.clean_cell("ME-Net · Pure", name, model(dataset, p=HIGH)),
            rows.clean_cell("Madry · Adversarial", name, model(dataset, "madry")),
            rows.clean_cell("ME-Net · Adversarial", name, model(dataset, "me-net", "adversarial", BEST[dataset])),
        )
    return Table("table7", "Clean images, four datasets", cells, "generalization clean")
