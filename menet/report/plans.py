"""What `menet reproduce` can run: the experiments, their jobs and estimated cost, and a line per finished job."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from menet.experiments import EXPERIMENTS, cost_model, experiment, results
from menet.experiments.jobs import Job, Workspace
from menet.experiments.plan import Experiment, graph
from menet.experiments.plan import Table as PaperTable
from menet.experiments.runner import JobOutcome, finished
from menet.experiments.scale import SCALES, Scale
from menet.files import write_atomically
from menet.progress import format_duration
from menet.report.tables import Cell, Table

LONGEST = 12
"""Jobs that a dry run names."""


class JobLines:
    """Prints one line per job that ran; those finished before are only counted."""

    def __init__(self, total: int) -> None:
        self.total, self.ended, self.console = total, 0, Console(stderr=True, highlight=False)

    def __call__(self, outcome: JobOutcome) -> None:
        self.ended += 1
        if outcome.status != "kept":
            words = outcome.message if not outcome.succeeded else f"{outcome.seconds:.1f} s"
            line = f"[{self.ended}/{self.total}] {outcome.status}: {outcome.title} ({words})"
            self.console.print(escape(line), soft_wrap=True)


def experiments_table(scale: Scale, places: Workspace) -> Table:
    """Every experiment with what it needs at a scale, and how much of it is finished."""
    rows = []
    for name in EXPERIMENTS:
        plan = experiment(name).at(scale)
        jobs = graph(plan.jobs)
        there = sum(finished(job, places) is not None for job in jobs)
        measured = ", ".join(one for one in SCALES if results.summary_path(places, one, name).is_file())
        trained = sum(job.kind == "train" for job in jobs)
        counts = (Cell(str(count), number=True) for count in (trained, len(jobs), there))
        rows.append((Cell(name), Cell(_content(plan)), *counts, Cell(measured or "–")))
    columns = ("name", "content", "models", "jobs", "finished", "measured at")
    return Table(f"scale {scale.name}: {scale.summary}", columns, tuple(rows))


def show_cost(jobs: Sequence[Job], scale: Scale, places: Workspace, workers: int) -> None:
    """Print the jobs by kind with time, GPU-hours and disk space, and the longest ones; write the whole graph."""
    speed = cost_model.speed_of_a_core()
    waiting = [job for job in jobs if finished(job, places) is None]
    costs = {job.key: cost_model.cost_of(job) for job in waiting}
    rows = []
    for kind in [*dict.fromkeys(job.kind for job in jobs), "all"]:
        chosen = [job for job in waiting if kind in (job.kind, "all")]
        count = sum(kind in (job.kind, "all") for job in jobs)
        numbers = (
            str(count),
            str(count - len(chosen)),
            _number(sum(costs[job.key].seconds(speed) for job in chosen) / 3600),
            _number(sum(costs[job.key].gpu_seconds() for job in chosen) / 3600),
            _bytes(sum(costs[job.key].disk for job in chosen)),
        )
        rows.append((Cell(kind), *(Cell(number, number=True) for number in numbers)))
    columns = ("kind", "jobs", "finished", "core-hours", "GPU-hours", "disk")
    console = Console()
    Table(f"scale {scale.name}: {scale.summary}", columns, tuple(rows)).print(console)
    spent = sum(costs[job.key].seconds(speed) for job in waiting) / workers
    console.print(f"about {format_duration(spent)} on this machine with {workers} jobs in parallel; the longest:")
    for job in sorted(waiting, key=lambda one: -costs[one.key].seconds(speed))[:LONGEST]:
        edges = " ← " + ", ".join(need.key[:8] for need in job.needs) if job.needs else ""
        line = f"  {job.key[:8]}{edges}  {format_duration(costs[job.key].seconds(speed))}  {job.title()}"
        console.print(escape(line), highlight=False, soft_wrap=True)
    listing = places.root / "plans" / f"{scale.name}.json"
    _write_graph(listing, jobs, speed)
    console.print(f"the whole graph: {listing}", soft_wrap=True)


def _write_graph(path: Path, jobs: Sequence[Job], speed: float) -> None:
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
                "bytes": round(cost.disk),
            }
        )
    write_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False))


def _content(plan: Experiment) -> str:
    if isinstance(plan, PaperTable):
        extra = sum(cell.ours for cell in plan.cells)
        numbers = f"{len(plan.cells) - extra} of the paper's numbers" + (f", {extra} ours" if extra else "")
        return f"{plan.title} ({numbers if plan.label else f'{extra} numbers, ours'})"
    return plan.title


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
