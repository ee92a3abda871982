"""CIFAR-10 under black-box attacks, all schedules of p (appendix)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, black_box, model
from menet.experiments.plan import Table


def plan() -> Table:
    columns = ("Clean", *rows.BLACK)
    cells = rows.attacked("Vanilla", model("cifar10", "vanilla"), columns, black_box)
    cells += rows.attacked("Madry", model("cifar10", "madry"), ("Clean", "FGSM", "PGD 7", "CW κ=20"), black_box)
    thermometer = model("cifar10", "thermometer", "adversarial")
    cells += rows.attacked("Thermometer", thermometer, ("Clean", "PGD 7"), black_box)
    for p in (HIGH, MIDDLE, LOW):
        cells += rows.attacked(f"ME-Net · {rows.words(p)}", model("cifar10", p=p), columns, black_box)
    return Table("table9", "CIFAR-10, black-box", cells, "appendix cifar black")
