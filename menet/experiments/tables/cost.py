"""Ours: what each preprocessing costs, in milliseconds per image on the machine that measured."""

from typing import Any

from menet.experiments.measures import Cost
from menet.experiments.plan import Cell, Table
from menet.training.recipes import me_net

METHODS: dict[str, dict[str, Any]] = {
    "USVT": me_net("usvt"),
    "Soft-Impute": me_net("soft-impute"),
    "Nuclear norm": me_net("nuclear-norm"),
    "Tensor": me_net("tensor"),
    "Thermometer": {"name": "thermometer"},
    "Total variation": {"name": "total-variation"},
    "JPEG": {"name": "jpeg"},
}


def plan() -> Table:
    cells = []
    for name, defense in METHODS.items():
        for p in (0.5, 0.9) if defense["name"] == "me-net" else (None,):
            chosen = defense if p is None else {**defense, "p": p, "masks": 1}
            row = name if p is None else f"{name} · p {p:g}"
            cells.append(Cell(row, "ms per image", Cost(dataset="cifar10", defense=chosen), ours=True))
    return Table("cost", "Cost of each preprocessing", tuple(cells), note="Best of five rounds, in a batch.")
