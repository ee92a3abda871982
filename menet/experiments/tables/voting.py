"""A vote of ten masks beside one mask, four datasets (appendix)."""

from dataclasses import replace

from menet.experiments import rows
from menet.experiments.paper import LOW, LOWEST, Schedule, model, white_box
from menet.experiments.plan import NAMES, Cell, Criterion, Table

SCHEDULES: dict[str, Schedule] = {"mnist": LOWEST, "cifar10": LOW, "svhn": LOWEST, "tiny-imagenet": LOW}


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    kinds: tuple[tuple[str, Criterion], ...] = (("Standard", "expected"), ("Vote", "vote"))
    for steps in (40, 100, 1000):
        for name, criterion in kinds:
            for dataset, p in SCHEDULES.items():
                victim = model(dataset, "me-net", "adversarial", p)
                for column, top in _columns(dataset):
                    row, job = f"{steps} · {name}", white_box(victim, steps)
                    cells += (Cell(row, column, job, criterion=criterion, top=top),)
                    extra = rows.beyond(row, victim, steps, top, of=column)
                    cells += tuple(replace(one, criterion=criterion) for one in extra)
    return Table("table26", "A vote of ten masks beside one mask", cells, "voting")


def _columns(dataset: str) -> tuple[tuple[str, int], ...]:
    name = NAMES[dataset]
    return ((f"{name} Top-1", 1), (f"{name} Top-5", 5)) if dataset == "tiny-imagenet" else ((name, 1),)
