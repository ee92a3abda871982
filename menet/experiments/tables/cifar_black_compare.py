"""CIFAR-10 under transferred attacks, beside other defenses (main text)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, black_box, model
from menet.experiments.plan import Table


def plan() -> Table:
    columns = ("CW", "FGSM", "PGD 7")
    cells = rows.attacked("Vanilla · SGD", model("cifar10", "vanilla"), columns, black_box)
    cells += rows.attacked("Madry · Adv. train", model("cifar10", "madry"), columns, black_box)
    cells += rows.attacked("Thermometer · SGD", model("cifar10", "thermometer"), ("PGD 7",), black_box)
    trained = model("cifar10", "thermometer", "adversarial")
    cells += rows.attacked("Thermometer · Adv. train", trained, ("PGD 7",), black_box)
    cells += rows.attacked("ME-Net · SGD", model("cifar10", p=HIGH), columns, black_box)
    return Table("table1", "CIFAR-10, black-box, beside other defenses", cells, "cifar black compare")
