"""CIFAR-10: preprocessing alone under white-box attacks (main text)."""

from menet.experiments import rows
from menet.experiments.paper import LOW, Method, model, white_box
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    compared: tuple[tuple[str, Method, int], ...] = (
        ("Thermometer", "thermometer", 40),
        ("PixelDefend", "pixel-defend", 100),
        ("TV Minimization", "total-variation", 100),
        ("ME-Net", "me-net", 1000),
    )
    cells: tuple[Cell, ...] = ()
    for name, method, steps in compared:
        row, victim = f"{name} · Prep. · {steps}", model("cifar10", method, p=LOW)
        cells += (Cell(row, "Accuracy", white_box(victim, steps)), *rows.beyond(row, victim))
    return Table("table3", "CIFAR-10, white-box, preprocessing alone", cells, "cifar white compare")
