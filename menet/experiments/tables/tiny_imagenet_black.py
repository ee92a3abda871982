"""Tiny-ImageNet under black-box attacks, top-1."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, MIDDLE, black_box, model
from menet.experiments.plan import Table


def plan() -> Table:
    columns = ("Clean", *rows.BLACK)
    cells = rows.attacked("Vanilla", model("tiny-imagenet", "vanilla"), columns, black_box)
    for p in (HIGH, MIDDLE, LOW):
        cells += rows.attacked(f"ME-Net · {rows.words(p)}", model("tiny-imagenet", p=p), columns, black_box)
    return Table("table20", "Tiny-ImageNet, black-box", cells, "appendix timgnet black")
