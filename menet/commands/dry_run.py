"""What `menet reproduce --list` and `--dry-run` print: the experiments, their jobs, and what these will cost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.markup import escape

from menet.commands.output import Output

if TYPE_CHECKING:
    from menet.experiments.jobs import Job, Workspace
    from menet.experiments.plan import Experiment
    from menet.experiments.scale import Scale
    from menet.report.tables import Table

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


def experiments_table(scale: "Scale", places: "Workspace") -> "Table":
    """Every experiment with what it needs at a scale, and how much of it is finished."""
    from menet.experiments import EXPERIMENTS, experiment
    from menet.experiments.plan import graph, summary_path
    from menet.experiments.runner import finished
    from menet.experiments.scale import SCALES
    from menet.report.tables import Cell, Table

    rows = []
    for name in EXPERIMENTS:
        plan = experiment(name).at(scale)
        jobs = graph(plan.jobs)
        there = sum(finished(job, places) is not None for job in jobs)
        measured = ", ".join(one for one in SCALES if summary_path(places, one, name).is_file())
        trained = sum(job.kind == "train" for job in jobs)
        counts = (Cell(str(count), number=True) for count in (trained, len(jobs), there))
        rows.append((Cell(name), Cell(_content(plan)), *counts, Cell(measured or "–")))
    columns = ("name", "content", "models", "jobs", "finished", "measured at")
    return Table(f"scale {scale.name}: {scale.summary}", columns, tuple(rows))


def show_cost(
    jobs: Sequence["Job"],
    chosen: Sequence[tuple[str, Sequence["Job"]]],
    unfiltered: Sequence[tuple[str, Sequence["Job"]]],
    scale: "Scale",
    places: "Workspace",
    resources: Resources,
    out: Output,
) -> None:
    """Print what jobs cost by experiment and by kind, and the longest ones; write the whole graph."""
    from menet.experiments import cost_model
    from menet.experiments.runner import finished
    from menet.progress import format_duration
    from menet.report.tables import Cell, Table

    speed, gpu = cost_model.speed_of_a_core(), bool(resources.gpus)
    waiting = [job for job in jobs if finished(job, places) is None]
    every = {job.key: job for _, part in (*chosen, *unfiltered) for job in part} | {job.key: job for job in jobs}
    costs = {key: cost_model.cost_of(job) for key, job in every.items()}

    def numbers(part: Sequence["Job"]) -> tuple[str, str, str]:
        return (
            _number(sum(costs[job.key].seconds(speed) for job in part) / 3600),
            _number(sum(costs[job.key].gpu_seconds() for job in part) / 3600),
            format_bytes(sum(costs[job.key].disk for job in part)),
        )

    console = Console()
    rows = []
    for (name, part), (_, full) in zip(chosen, unfiltered, strict=True):
        left = [job for job in part if finished(job, places) is None]
        core, on_gpu, disk = numbers(left)
        memory = format_bytes(max(map(cost_model.memory_of, part), default=0.0))
        hours = (on_gpu, numbers(full)[1], memory) if gpu else (core, numbers(full)[0], on_gpu)
        cells = (str(len(part)), str(len(part) - len(left)), *hours, disk)
        rows.append((Cell(name), *(Cell(cell, number=True) for cell in cells)))
    # Seven columns fit into a terminal of 80.
    hours = ("GPU-hours", "unfiltered", "GPU memory") if gpu else ("core-hours", "unfiltered", "GPU-hours")
    note = "Unfiltered: without --datasets, --match, --without-extensions and --examples. Experiments share jobs."
    columns = ("experiment", "jobs", "done", *hours, "disk")
    out.table(Table(f"scale {scale.name}: {scale.summary}", columns, tuple(rows), note), console)
    rows = []
    for kind in [*dict.fromkeys(job.kind for job in jobs), "all"]:
        left = [job for job in waiting if kind in (job.kind, "all")]
        count = sum(kind in (job.kind, "all") for job in jobs)
        by_kind = (str(count), str(count - len(left)), *numbers(left))
        rows.append((Cell(kind), *(Cell(cell, number=True) for cell in by_kind)))
    heads = ("kind", "jobs", "done", "core-hours", "GPU-hours", "disk")
    out.table(Table("each job once", heads, tuple(rows)), console)
    # Of one GPU's jobs each has a part of its speed, so more of them at a time are no faster by this model.
    seconds = {job.key: costs[job.key].gpu_seconds() if gpu else costs[job.key].seconds(speed) for job in waiting}
    spent = sum(seconds.values()) / (len(resources.gpus) if gpu else resources.workers)
    spent = max(spent, max(seconds.values(), default=0.0))
    where = "on GPUs of the assumed speed" if gpu else "on this machine"
    line = f"about {format_duration(spent)} ({spent / 3600:.2g} hours) {where}, {resources.describe()}"
    if gpu:
        most = max(map(cost_model.memory_of, jobs), default=0.0)
        line += f"; GPU memory about {format_bytes(resources.jobs_per_gpu * most)}"
    console.print(f"{line}; the longest:", soft_wrap=True, highlight=False)
    for job in sorted(waiting, key=lambda one: -seconds[one.key])[:LONGEST]:
        edges = " ← " + ", ".join(need.key[:8] for need in job.needs) if job.needs else ""
        memory = f", {format_bytes(cost_model.memory_of(job))}" if gpu else ""
        line = f"  {job.key[:8]}{edges}  {format_duration(seconds[job.key])}{memory}  {job.title()}"
        console.print(escape(line), highlight=False, soft_wrap=True)
    listing = places.root / "plans" / f"{scale.name}.json"
    _write_graph(listing, jobs, speed)
    console.print(f"the whole graph: {listing}", soft_wrap=True)


def _write_graph(path: Path, jobs: Sequence["Job"], speed: float) -> None:
    from menet.experiments import cost_model
    from menet.files import write_atomically

    rows = []
    for job in jobs:
        cost = cost_model.cost_of(job)
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


def _content(plan: "Experiment") -> str:
    from menet.experiments.plan import Table

    if isinstance(plan, Table):
        extra = sum(cell.ours for cell in plan.cells)
        numbers = f"{len(plan.cells) - extra} of the paper's numbers" + (f", {extra} ours" if extra else "")
        return f"{plan.title} ({numbers if plan.label else f'{extra} numbers, ours'})"
    return plan.title


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def format_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
