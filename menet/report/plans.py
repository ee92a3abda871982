"""What `menet reproduce` has measured and would measure: experiments, their jobs, and what these will cost."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from menet import data
from menet.experiments import EXPERIMENTS, cost_model, experiment
from menet.experiments.jobs import Job, Train, Workspace
from menet.experiments.plan import NAMES, Experiment, datasets_of, graph
from menet.experiments.plan import Table as PlannedTable
from menet.experiments.runner import finished
from menet.experiments.scale import SMOKE, Scale
from menet.files import write_atomically
from menet.progress import format_bytes, format_duration
from menet.report import Cell, Table
from menet.report.reproduction import measured_at

LONGEST = 12
"""Jobs that a dry run names."""


class Resources(NamedTuple):
    """What jobs can run on at the same time."""

    workers: int
    gpus: tuple[str, ...]
    jobs_per_gpu: int

    def describe(self) -> str:
        """In words, as the end of a sentence."""
        if not self.gpus:
            return f"{self.workers} jobs in parallel"
        count = f"{len(self.gpus)} GPU" + ("s" if len(self.gpus) > 1 else "")
        each = "one job" if self.jobs_per_gpu == 1 else f"{self.jobs_per_gpu} jobs"
        return f"{count}, {each} at a time on each"


def experiments_table(scale: Scale, places: Workspace, published: Path) -> tuple[Table, str]:
    """Every experiment with what it needs at a scale and what is measured at any, and a sentence on the whole."""
    rows, claimed, measured = [], 0, 0
    for name in EXPERIMENTS:
        plan = experiment(name).at(scale)
        jobs = graph(plan.jobs)
        there = sum(finished(job, places) is not None for job in jobs)
        found = measured_at(name, (places.root, published))
        words = (f"{one}: {len(cells)} of {total}" if total else one for one, (cells, total) in found.items())
        claimed += claims_of(experiment(name))
        measured += len(set().union(*(cells for one, (cells, _) in found.items() if one != SMOKE.name)))
        trained = sum(job.kind == "train" for job in jobs)
        counts = (Cell(str(count), number=True) for count in (trained, len(jobs), there))
        rows.append((Cell(name), Cell(_content(plan)), *counts, Cell("; ".join(words) or "–")))
    columns = ("name", "content", "models", "jobs", "finished", "measured at")
    summary = f"{measured} of the paper's {claimed} numbers are measured, the smoke test not counted"
    return Table(f"scale {scale.name}: {scale.summary}", columns, tuple(rows)), summary


class PlannedCost(NamedTuple):
    """What jobs cost, by experiment and by kind, and the longest of them in words."""

    by_experiment: Table
    by_kind: Table
    lines: list[str]


def planned_cost(
    jobs: Sequence[Job],
    chosen: Sequence[tuple[str, Sequence[Job]]],
    unfiltered: Sequence[tuple[str, Sequence[Job]]],
    scale: Scale,
    places: Workspace,
    resources: Resources,
) -> PlannedCost:
    """What jobs cost; the whole graph is written to a file, which the last line names."""

    speed, gpu = cost_model.speed_of_a_core(), bool(resources.gpus)
    waiting = [job for job in jobs if not _is_there(job, places)]
    every = {job.key: job for _, part in (*chosen, *unfiltered) for job in part} | {job.key: job for job in jobs}
    counts = _at_hand(jobs, places)
    costs = {key: cost_model.cost_of(cost_model.at_hand(job, counts)) for key, job in every.items()}

    def numbers(part: Sequence[Job]) -> tuple[str, str, str]:
        return (
            _number(sum(costs[job.key].seconds(speed) for job in part) / 3600),
            _number(sum(costs[job.key].gpu_seconds() for job in part) / 3600),
            format_bytes(sum(costs[job.key].disk for job in part)),
        )

    rows = []
    for (name, part), (_, full) in zip(chosen, unfiltered, strict=True):
        left = [job for job in part if not _is_there(job, places)]
        core, on_gpu, disk = numbers(left)
        memory = format_bytes(max(map(cost_model.memory_of, part), default=0.0))
        hours = (on_gpu, numbers(full)[1], memory) if gpu else (core, numbers(full)[0], on_gpu)
        cells = (str(len(part)), str(len(part) - len(left)), *hours, disk)
        rows.append((Cell(name), *(Cell(cell, number=True) for cell in cells)))
    # Seven columns fit into a terminal of 80.
    hours = ("GPU-hours", "unfiltered", "GPU memory") if gpu else ("core-hours", "unfiltered", "GPU-hours")
    note = (
        "Unfiltered: without --datasets, --match, --missing, --without-extensions and --examples. Experiments "
        "share jobs."
    )
    columns = ("experiment", "jobs", "done", *hours, "disk")
    by_experiment = Table(f"scale {scale.name}: {scale.summary}", columns, tuple(rows), note)
    rows = []
    for kind in [*dict.fromkeys(job.kind for job in jobs), "all"]:
        left = [job for job in waiting if kind in (job.kind, "all")]
        count = sum(kind in (job.kind, "all") for job in jobs)
        counted = (str(count), str(count - len(left)), *numbers(left))
        rows.append((Cell(kind), *(Cell(cell, number=True) for cell in counted)))
    heads = ("kind", "jobs", "done", "core-hours", "GPU-hours", "disk")
    by_kind = Table("each job once", heads, tuple(rows))
    # Of one GPU's jobs each has a part of its speed, so more of them at a time are no faster by this model.
    seconds = {job.key: costs[job.key].gpu_seconds() if gpu else costs[job.key].seconds(speed) for job in waiting}
    spent = sum(seconds.values()) / (len(resources.gpus) if gpu else resources.workers)
    spent = max(spent, max(seconds.values(), default=0.0))
    where = "on GPUs of the assumed speed" if gpu else "on this machine"
    line = f"about {format_duration(spent)} ({spent / 3600:.2g} hours) {where}, {resources.describe()}"
    if gpu:
        most = max(map(cost_model.memory_of, jobs), default=0.0)
        line += f"; GPU memory about {format_bytes(resources.jobs_per_gpu * most)}"
    lines = [f"{line}; the longest:"]
    for job in sorted(waiting, key=lambda one: -seconds[one.key])[:LONGEST]:
        edges = " ← " + ", ".join(need.key[:8] for need in job.needs) if job.needs else ""
        memory = f", {format_bytes(cost_model.memory_of(job))}" if gpu else ""
        line = f"  {job.key[:8]}{edges}  {format_duration(seconds[job.key])}{memory}  {job.title()}"
        lines.append(line)
    listing = places.root / "plans" / f"{scale.name}.json"
    _write_graph(listing, jobs, costs, speed)
    for name, (training, testing) in counts.items():
        lines.append(
            f"{NAMES.get(name, name)} as it is at hand: {training:,} training images, {testing:,} test images"
        )
    return PlannedCost(by_experiment, by_kind, [*lines, f"the whole graph: {listing}"])


def _at_hand(jobs: Sequence[Job], places: Workspace) -> dict[str, tuple[int, int]]:
    """Training and test images of the datasets of which only a part is installed."""
    found = {}
    for name in sorted(set().union(*map(datasets_of, jobs)) & data.SOURCES.keys()):
        counts, published = data.counted(name, places.data), data.source(name).images
        if counts and published and (counts[0] < published[0] or counts[1] < published[1]):
            found[name] = counts
    return found


def _is_there(job: Job, places: Workspace) -> bool:
    """Whether a job is finished, or its network ships with the package and is to be taken."""
    return finished(job, places) is not None or (
        places.shipped and isinstance(job, Train) and job.shipped() is not None
    )


def _write_graph(path: Path, jobs: Sequence[Job], costs: Mapping[str, cost_model.Cost], speed: float) -> None:

    rows = []
    for job in jobs:
        cost = costs[job.key]
        rows.append(
            {
                "key": job.key,
                "kind": job.kind,
                "title": job.title(),
                "needs": [need.key for need in job.needs],
                "core_seconds": round(cost.seconds(speed), 1),
                "gpu_seconds": round(cost.gpu_seconds(), 3),
                "gpu_memory": round(cost_model.memory_of(job)),
                "bytes": round(cost.disk),
            }
        )
    write_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False))


def _content(plan: Experiment) -> str:

    if isinstance(plan, PlannedTable):
        claimed = claims_of(plan)
        extra = len(plan.cells) - claimed
        numbers = f"{claimed} of the paper's numbers" + (f", {extra} ours" if extra else "")
        return f"{plan.title} ({numbers if plan.label else f'{extra} numbers, ours'})"
    return plan.title


def claims_of(plan: Experiment) -> int:
    """How many of the paper's numbers an experiment measures."""
    return sum(not cell.ours for cell in getattr(plan, "cells", ()))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
