"""The appendix's tables of the other datasets: MNIST (14 to 16), SVHN (17 to 19) and Tiny-ImageNet (20 to 22).

Each dataset has one of black-box, one of gray-box and one of white-box attacks.
"""

from menet.experiments.jobs import format_schedule
from menet.experiments.plan import Cell, Table
from menet.experiments.tables import (
    STEPS,
    black_box_row,
    black_box_table,
    gradient_columns,
    gray_box_table,
    model,
    schedules,
    white_box_row,
    white_box_table,
)


def table14() -> Table:
    """MNIST, black-box attacks."""
    madry = ("Clean", *gradient_columns("mnist"))
    baselines = (
        *black_box_row("Madry", model("mnist", "madry"), madry),
        *black_box_row("Thermometer", model("mnist", "thermometer"), ("Clean", "PGD 40")),
    )
    return black_box_table("table14", "mnist", "appendix mnist black", baselines)


def table15() -> Table:
    """MNIST, gray-box attacks."""
    return gray_box_table("table15", "mnist", "appendix mnist gray")


def table16() -> Table:
    """MNIST, white-box attacks, with and without adversarial training."""
    return white_box_table("table16", "mnist", "appendix mnist white")


def table17() -> Table:
    """SVHN, black-box attacks."""
    return black_box_table("table17", "svhn", "appendix svhn black")


def table18() -> Table:
    """SVHN, gray-box attacks."""
    return gray_box_table("table18", "svhn", "appendix svhn gray")


def table19() -> Table:
    """SVHN, white-box attacks, with and without adversarial training."""
    return white_box_table("table19", "svhn", "appendix svhn white")


def table20() -> Table:
    """Tiny-ImageNet, black-box attacks, top-1 accuracy."""
    return black_box_table("table20", "tiny-imagenet", "appendix timgnet black")


def table21() -> Table:
    """Tiny-ImageNet, gray-box attacks, top-1 accuracy."""
    return gray_box_table("table21", "tiny-imagenet", "appendix timgnet gray")


def table22() -> Table:
    """Tiny-ImageNet, white-box attacks on adversarially trained models, top-1 and top-5 accuracy."""
    cells: tuple[Cell, ...] = ()
    for top in (1, 5):
        cells += white_box_row(f"Top-{top} · Madry · Adv. train", model("tiny-imagenet", "madry"), STEPS, top=top)
        for p in schedules("tiny-imagenet"):
            row = f"Top-{top} · ME-Net {format_schedule(p)} · Prep. + Adv. train"
            victim = model("tiny-imagenet", "me-net", "adversarial", p)
            cells += white_box_row(row, victim, STEPS, top=top)
    return Table("table22", "Tiny-ImageNet, white-box", cells, "appendix timgnet white")
