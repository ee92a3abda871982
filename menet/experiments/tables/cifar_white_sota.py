"""CIFAR-10: adversarial training under white-box attacks of 1000 steps (main text)."""

from menet.experiments import rows
from menet.experiments.paper import LOW, WIDE, Method, model, white_box
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    compared: tuple[tuple[str, str, Method, str | None], ...] = (
        ("ResNet-18 · Madry", "Adv. train", "madry", None),
        ("ResNet-18 · ME-Net", "Prep. + Adv. train", "me-net", None),
        ("WideResNet · Madry", "Adv. train", "madry", WIDE),
        ("WideResNet · Thermometer", "Prep. + Adv. train", "thermometer", WIDE),
        ("WideResNet · ME-Net", "Prep. + Adv. train", "me-net", WIDE),
    )
    cells: tuple[Cell, ...] = ()
    for name, kind, method, network in compared:
        row = f"{name} · {kind} · 1000"
        victim = model("cifar10", method, "adversarial", LOW, network=network)
        cells += (Cell(row, "Accuracy", white_box(victim, 1000)), *rows.beyond(row, victim))
    return Table("table4", "CIFAR-10, white-box, adversarial training", cells, "cifar white sota")
