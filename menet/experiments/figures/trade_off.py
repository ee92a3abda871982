"""Figure 8: accuracy on clean and on attacked images against p, four datasets."""

from menet.experiments.paper import HIGH, LOW, LOWEST, MIDDLE, clean, model, white_box
from menet.experiments.plan import NAMES, Cell, Figure, Panel, Point


def plan() -> Figure:
    panels = []
    for dataset, name in NAMES.items():
        clean_points, attacked_points = [], []
        for p in (LOWEST, LOW, MIDDLE, HIGH):
            victim, middle = model(dataset, p=p), sum(p) / 2
            clean_points.append(Point(middle, Cell("clean", f"{middle:g}", clean(victim), clean=True)))
            attacked_points.append(Point(middle, Cell("attacked", f"{middle:g}", white_box(victim, 7))))
        curves = (("clean", tuple(clean_points)), ("7 steps of BPDA", tuple(attacked_points)))
        panels.append(Panel(name, curves))
    title = "Accuracy against robustness over p"
    return Figure("figure8", title, "lines", tuple(panels), "middle of the schedule of p", "appendix tradeoff")
