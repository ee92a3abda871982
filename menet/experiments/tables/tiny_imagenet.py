"""Tiny-ImageNet: the appendix's tables 20 (black-box), 21 (gray-box) and 22 (white-box)."""

from menet.experiments.jobs import format_schedule
from menet.experiments.plan import Cell, Table
from menet.experiments.tables import STEPS, black_box_table, gray_box_table, model, schedules, white_box_row


def table20() -> Table:
    """Black-box attacks, top-1 accuracy."""
    return black_box_table("table20", "tiny-imagenet", "appendix timgnet black")


def table21() -> Table:
    """Gray-box attacks, top-1 accuracy."""
    return gray_box_table("table21", "tiny-imagenet", "appendix timgnet gray")


def table22() -> Table:
    """White-box attacks on adversarially trained models, top-1 and top-5 accuracy."""
    cells: tuple[Cell, ...] = ()
    for top in (1, 5):
        cells += white_box_row(f"Top-{top} · Madry · Adv. train", model("tiny-imagenet", "madry"), STEPS, top=top)
        for p in schedules("tiny-imagenet"):
            row = f"Top-{top} · ME-Net {format_schedule(p)} · Prep. + Adv. train"
            victim = model("tiny-imagenet", "me-net", "adversarial", p)
            cells += white_box_row(row, victim, STEPS, top=top)
    return Table("table22", "Tiny-ImageNet, white-box", cells, "appendix timgnet white")
