"""Rows that several tables are made of."""

from collections.abc import Callable, Sequence

from menet.experiments import paper
from menet.experiments.jobs import Evaluate, Train
from menet.experiments.paper import Schedule
from menet.experiments.plan import Cell

BLACK = ("FGSM", "PGD 7", "PGD 20", "PGD 40", "CW κ=20", "CW κ=50", "Boundary", "SPSA")
BLACK_MNIST = ("FGSM", "PGD 40", "PGD 100", "CW κ=20", "CW κ=50", "Boundary", "SPSA")
GRADIENT = ("FGSM", "PGD 7", "PGD 20", "PGD 40", "CW κ=20", "CW κ=50")
GRADIENT_MNIST = ("FGSM", "PGD 40", "PGD 100", "CW κ=20", "CW κ=50")
STEPS = (7, 20, 40, 100, 1000)


def words(p: Schedule) -> str:
    """A schedule as the rows of tables name it: p 0.8→1."""
    return "p " + "→".join(f"{one:g}" for one in (p if isinstance(p, tuple) else (p,)))


def clean_cell(row: str, column: str, victim: Train, top: int = 1) -> Cell:
    """The accuracy of a model on clean images."""
    return Cell(row, column, paper.clean(victim), clean=True, top=top)


def attacked(
    row: str, victim: Train, columns: Sequence[str], attack: Callable[[Train, str], Evaluate]
) -> tuple[Cell, ...]:
    """A row of clean accuracy, where there is such a column, and attacks named by their columns."""
    return tuple(
        clean_cell(row, column, victim) if column == "Clean" else Cell(row, column, attack(victim, column))
        for column in columns
    )


def white(row: str, victim: Train, steps: Sequence[int], *, clean: bool = True, top: int = 1) -> tuple[Cell, ...]:
    """A row of a white-box table: clean, attacks of so many steps, and what the paper's tables lack."""
    cells = [clean_cell(row, "Clean", victim, top)] if clean else []
    cells += [Cell(row, str(count), paper.white_box(victim, count), top=top) for count in steps]
    return (*cells, *beyond(row, victim, max(steps), top))


def beyond(row: str, victim: Train, steps: int = 1000, top: int = 1, of: str = "") -> tuple[Cell, ...]:
    """True gradients and expectation over masks; for a ME-Net only, which has masks and an estimator."""
    if victim.config.defense.get("name") != "me-net":
        return ()
    return tuple(
        Cell(row, f"{of} {column}".strip(), paper.beyond(victim, column, steps), top=top, ours=True)
        for column in paper.BEYOND
    )
