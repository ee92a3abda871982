"""SVHN under black-box attacks."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, LOWEST, MIDDLE, black_box, model
from menet.experiments.plan import Table


def plan() -> Table:
    columns = ("Clean", *rows.BLACK)
    cells = rows.attacked("Vanilla", model("svhn", "vanilla"), columns, black_box)
    for p in (HIGH, MIDDLE, LOW, LOWEST):
        cells += rows.attacked(f"ME-Net · {rows.words(p)}", model("svhn", p=p), columns, black_box)
    return Table("table17", "SVHN, black-box", cells, "appendix svhn black")
