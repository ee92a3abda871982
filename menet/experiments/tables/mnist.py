"""MNIST: the appendix's tables 14 (black-box), 15 (gray-box) and 16 (white-box)."""

from menet.experiments.plan import Table
from menet.experiments.tables import (
    black_box_row,
    black_box_table,
    gradient_columns,
    gray_box_table,
    model,
    white_box_table,
)


def table14() -> Table:
    """Black-box attacks."""
    madry = ("Clean", *gradient_columns("mnist"))
    baselines = (
        *black_box_row("Madry", model("mnist", "madry"), madry),
        *black_box_row("Thermometer", model("mnist", "thermometer"), ("Clean", "PGD 40")),
    )
    return black_box_table("table14", "mnist", "appendix mnist black", baselines)


def table15() -> Table:
    """Gray-box attacks."""
    return gray_box_table("table15", "mnist", "appendix mnist gray")


def table16() -> Table:
    """White-box attacks, with and without adversarial training."""
    return white_box_table("table16", "mnist", "appendix mnist white")
