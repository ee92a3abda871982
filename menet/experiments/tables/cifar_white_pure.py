"""CIFAR-10: white-box attacks on preprocessing alone, all schedules of p (appendix)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, Schedule, model
from menet.experiments.plan import Table


def plan() -> Table:
    steps = (7, 20, 40, 100)
    cells = rows.white("Vanilla", model("cifar10", "vanilla"), steps, clean=False)
    cells += rows.white("Thermometer · Prep.", model("cifar10", "thermometer"), (40, 100), clean=False)
    cells += rows.white("PixelDefend · Prep.", model("cifar10", "pixel-defend"), (100,), clean=False)
    cells += rows.white("TV Minimization · Prep.", model("cifar10", "total-variation"), steps, clean=False)
    schedules: tuple[Schedule, ...] = (HIGH, (0.7, 0.9), MIDDLE, (0.5, 0.7), LOW)
    for p in schedules:
        cells += rows.white(f"ME-Net · {rows.words(p)} · Prep.", model("cifar10", p=p), steps, clean=False)
    return Table("table11", "CIFAR-10, white-box, preprocessing alone", cells, "appendix cifar white pure")
