"""CIFAR-10: the estimators under white-box attacks (appendix)."""

from menet.experiments import rows
from menet.experiments.paper import LOW, model
from menet.experiments.plan import Table
from menet.experiments.tables.estimators import ESTIMATORS


def plan() -> Table:
    cells = rows.white("Madry · Adv. train", model("cifar10", "madry"), rows.STEPS)
    for name, estimator in ESTIMATORS.items():
        victim = model("cifar10", "me-net", "adversarial", LOW, estimator=estimator)
        cells += rows.white(f"ME-Net - {name} · Prep. + Adv. train", victim, rows.STEPS)
    return Table("table24", "CIFAR-10, estimators, white-box", cells, "appendix me methods white")
