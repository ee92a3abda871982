"""Tiny-ImageNet: white-box attacks on adversarial training, top-1 and top-5."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, model
from menet.experiments.plan import Cell, Table


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    for top in (1, 5):
        madry = model("tiny-imagenet", "madry")
        cells += rows.white(f"Top-{top} · Madry · Adv. train", madry, rows.STEPS, top=top)
        for p in (HIGH, MIDDLE, LOW):
            row = f"Top-{top} · ME-Net {rows.words(p)} · Prep. + Adv. train"
            cells += rows.white(row, model("tiny-imagenet", "me-net", "adversarial", p), rows.STEPS, top=top)
    return Table("table22", "Tiny-ImageNet, white-box", cells, "appendix timgnet white")
