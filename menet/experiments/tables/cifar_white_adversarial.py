"""CIFAR-10: white-box attacks on adversarial training, two networks (appendix)."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, WIDE, model
from menet.experiments.plan import Table


def plan() -> Table:
    cells = rows.white("ResNet-18 · Madry · Adv. train", model("cifar10", "madry"), rows.STEPS)
    kind = "Prep. + Adv. train"
    for p in (HIGH, MIDDLE, LOW):
        victim = model("cifar10", "me-net", "adversarial", p)
        cells += rows.white(f"ResNet-18 · ME-Net {rows.words(p)} · {kind}", victim, rows.STEPS)
    cells += rows.white("Wide-ResNet · Madry · Adv. train", model("cifar10", "madry", network=WIDE), rows.STEPS)
    thermometer = model("cifar10", "thermometer", "adversarial", network=WIDE)
    cells += rows.white(f"Wide-ResNet · Thermometer · {kind}", thermometer, rows.STEPS)
    for p in (MIDDLE, LOW):
        victim = model("cifar10", "me-net", "adversarial", p, network=WIDE)
        cells += rows.white(f"Wide-ResNet · ME-Net {rows.words(p)} · {kind}", victim, rows.STEPS)
    return Table("table13", "CIFAR-10, white-box, adversarial training", cells, "appendix cifar white adv")
