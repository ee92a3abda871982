"""Figure 6: white-box accuracy against the number of steps, four datasets."""

from menet.experiments.jobs import Train
from menet.experiments.paper import LOW, LOWEST, Schedule, model, white_box
from menet.experiments.plan import NAMES, Cell, Figure, Panel, Point
from menet.experiments.rows import STEPS

SCHEDULES: dict[str, Schedule] = {"mnist": LOWEST, "cifar10": LOW, "svhn": LOWEST, "tiny-imagenet": LOW}


def plan() -> Figure:
    panels = []
    for dataset in ("cifar10", "mnist", "svhn", "tiny-imagenet"):
        p = SCHEDULES[dataset]
        victims = (
            ("Madry", model(dataset, "madry")),
            ("ME-Net", model(dataset, p=p)),
            ("ME-Net, adversarial", model(dataset, "me-net", "adversarial", p)),
        )
        steps = tuple(count for count in STEPS if dataset != "mnist" or count >= 40)
        curves = tuple((name, _curve(name, victim, steps)) for name, victim in victims)
        panels.append(Panel(NAMES[dataset], curves))
    return Figure("figure6", "White-box accuracy against steps", "lines", tuple(panels), "steps", "white box")


def _curve(name: str, victim: Train, steps: tuple[int, ...]) -> tuple[Point, ...]:
    return tuple(Point(count, Cell(name, str(count), white_box(victim, count))) for count in steps)
