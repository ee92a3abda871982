"""CIFAR-10: the two attacks that the paper made for ME-Net (main text)."""

from menet.experiments import rows
from menet.experiments.paper import LOW, Training, adaptive, model
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    kinds: tuple[tuple[str, Training], ...] = (("Pure", "standard"), ("Adversarial", "adversarial"))
    for name, training in kinds:
        row, victim = f"ME-Net · {name} · 1000", model("cifar10", "me-net", training, LOW)
        cells += (
            Cell(row, "Approx. Input", adaptive(victim, "approximate-input")),
            Cell(row, "Projected BPDA", adaptive(victim, "projected-bpda")),
            *rows.beyond(row, victim),
        )
    return Table("table5", "CIFAR-10, attacks made for ME-Net", cells, "adaptive attacks")
