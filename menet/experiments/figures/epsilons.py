"""Figure 7: white-box accuracy of ME-Net alone for ε = 2, 4 and 8, CIFAR-10."""

from menet.experiments.paper import HIGH, LOW, MIDDLE, Schedule, model, white_box
from menet.experiments.plan import Cell, Figure, Panel, Point
from menet.experiments.rows import words


def plan() -> Figure:
    schedules: tuple[Schedule, ...] = (HIGH, (0.7, 0.9), MIDDLE, (0.5, 0.7), LOW)
    panels = []
    for pixels in (2, 4, 8):
        curves = []
        for p in schedules:
            victim = model("cifar10", p=p)
            points = tuple(
                Point(steps, Cell(words(p), str(steps), white_box(victim, steps, epsilon=pixels / 255)))
                for steps in (7, 20, 40, 100)
            )
            curves.append((words(p), points))
        panels.append(Panel(f"ε = {pixels}/255", tuple(curves)))
    title = "CIFAR-10, white-box, ME-Net without adversarial training"
    return Figure("figure7", title, "lines", tuple(panels), "steps", "appendix cifar white pure")
