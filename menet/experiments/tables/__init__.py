"""The tables, by dataset: each a function that returns it at the paper's scale. Here: what several of them share.

Rows and columns are named as in `claims.json`, by which each cell finds the paper's number.
"""

from collections.abc import Callable, Sequence

from menet.experiments import paper
from menet.experiments.jobs import Evaluate, Train, format_schedule
from menet.experiments.paper import HIGH, LOW, LOWEST, MIDDLE, Schedule, Training, model
from menet.experiments.plan import NAMES, Cell, Table

TRAININGS: tuple[tuple[str, Training], ...] = (("Prep.", "standard"), ("Prep. + Adv. train", "adversarial"))
STEPS = (7, 20, 40, 100, 1000)
"""Steps of the white-box attacks."""


def schedules(dataset: str) -> tuple[Schedule, ...]:
    """The schedules of p in the tables of a dataset."""
    return (HIGH, MIDDLE, LOW, LOWEST) if dataset in ("mnist", "svhn") else (HIGH, MIDDLE, LOW)


def white_box_steps(dataset: str) -> tuple[int, ...]:
    """The steps of a dataset's white-box attacks; at MNIST's large ε the paper starts at 40."""
    return tuple(steps for steps in STEPS if steps >= 40) if dataset == "mnist" else STEPS


def gradient_columns(dataset: str) -> tuple[str, ...]:
    """The attacks of the gray-box tables, which transfer in the black-box tables."""
    steps = (40, 100) if dataset == "mnist" else (7, 20, 40)
    return ("FGSM", *(f"PGD {count}" for count in steps), "CW κ=20", "CW κ=50")


def black_box_table(name: str, dataset: str, label: str, baselines: tuple[Cell, ...] = ()) -> Table:
    """Transfer, Boundary and SPSA attacks on the vanilla network, the baselines, and ME-Net by schedule of p."""
    columns = ("Clean", *gradient_columns(dataset), "Boundary", "SPSA")
    cells = (*attack_row("Vanilla", model(dataset, "vanilla"), columns, paper.black_box), *baselines)
    for p in schedules(dataset):
        row = f"ME-Net · {format_schedule(p)}"
        cells += attack_row(row, model(dataset, p=p), columns, paper.black_box)
    return Table(name, f"{NAMES[dataset]}, black-box", cells, label)


def gray_box_table(name: str, dataset: str, label: str) -> Table:
    """Gradient attacks on ME-Net's network by an adversary unaware of the preprocessing, by schedule of p."""
    cells: tuple[Cell, ...] = ()
    for p in schedules(dataset):
        row = f"ME-Net · {format_schedule(p)}"
        cells += attack_row(row, model(dataset, p=p), gradient_columns(dataset), paper.gray_box)
    return Table(name, f"{NAMES[dataset]}, gray-box", cells, label)


def white_box_table(name: str, dataset: str, label: str) -> Table:
    """BPDA on ME-Net with and without adversarial training, by schedule of p, next to Madry."""
    steps = white_box_steps(dataset)
    cells = white_box_row("Madry · Adv. train", model(dataset, "madry"), steps)
    for words, training in TRAININGS:
        for p in schedules(dataset):
            row = f"ME-Net · {format_schedule(p)} · {words}"
            cells += white_box_row(row, model(dataset, "me-net", training, p), steps)
    return Table(name, f"{NAMES[dataset]}, white-box", cells, label)


def attack_row(
    row: str, victim: Train, columns: Sequence[str], attack: Callable[[Train, str], Evaluate]
) -> tuple[Cell, ...]:
    """Robust accuracy under the attack that each column names; clean accuracy in the column Clean."""
    return tuple(
        clean_cell(row, column, victim) if column == "Clean" else Cell(row, column, attack(victim, column))
        for column in columns
    )


def white_box_row(
    row: str, victim: Train, steps: Sequence[int], *, clean: bool = True, top: int = 1
) -> tuple[Cell, ...]:
    """Clean accuracy, white-box attacks by number of steps, and the extensions."""
    cells = [clean_cell(row, "Clean", victim, top)] if clean else []
    cells += [Cell(row, str(count), paper.white_box(victim, count), top=top) for count in steps]
    return (*cells, *extension_cells(row, victim, max(steps), top))


def summary_row(row: str, pure: Train, trained: Train) -> tuple[Cell, ...]:
    """Clean and black-box accuracy of one model, white-box accuracy of another, adversarially trained one."""
    return (
        clean_cell(row, "Clean", pure),
        Cell(row, "Black-box", paper.black_box(pure, "PGD 40")),
        Cell(row, "White-box", paper.white_box(trained, 1000)),
        *extension_cells(row, trained),
    )


def clean_cell(row: str, column: str, victim: Train, top: int = 1) -> Cell:
    """Clean accuracy of a model."""
    return Cell(row, column, paper.clean(victim), clean=True, top=top)


def extension_cells(
    row: str, victim: Train, steps: int = 1000, top: int = 1, prefix: str = ""
) -> tuple[Cell, ...]:
    """Exact gradients and EOT, for ME-Net only, which has random masks and a differentiable estimator."""
    if victim.config.defense.get("name") != "me-net":
        return ()
    return tuple(
        Cell(row, f"{prefix} {column}".strip(), paper.extension(victim, column, steps), top=top, ours=True)
        for column in paper.EXTENSIONS
    )
