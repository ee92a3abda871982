"""SVHN: the appendix's tables 17 (black-box), 18 (gray-box) and 19 (white-box)."""

from menet.experiments.plan import Table
from menet.experiments.tables import black_box_table, gray_box_table, white_box_table


def table17() -> Table:
    """Black-box attacks."""
    return black_box_table("table17", "svhn", "appendix svhn black")


def table18() -> Table:
    """Gray-box attacks."""
    return gray_box_table("table18", "svhn", "appendix svhn gray")


def table19() -> Table:
    """White-box attacks, with and without adversarial training."""
    return white_box_table("table19", "svhn", "appendix svhn white")
