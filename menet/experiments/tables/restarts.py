"""CIFAR-10: random restarts and step sizes of a 100-step attack (appendix)."""

from menet.experiments import rows
from menet.experiments.paper import LOW, Method, model, white_box
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    compared: tuple[tuple[str, Method], ...] = (("Madry", "madry"), ("ME-Net", "me-net"))
    for name, method in compared:
        victim = model("cifar10", method, "adversarial", LOW)
        for pixels in (2, 4, 8):
            row = f"{name} · {pixels}/255"
            for restarts in (10, 20, 50):
                job = white_box(victim, 100, step_size=pixels / 255, restarts=restarts)
                cells += (Cell(row, str(restarts), job, criterion="hard"),)
            cells += rows.beyond(row, victim, 100)
    note = "Right only if no restart fooled it; for random masks that is a matter of chance as well."
    return Table("table25", "CIFAR-10, restarts and step sizes", cells, "appendix random start", note)
