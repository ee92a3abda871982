"""`menet reproduce`: any table or figure of the paper, measured anew beside what the paper claims."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from menet.errors import ConfigurationError
from menet.experiments import estimates, results
from menet.experiments.catalog import EXPERIMENTS, plan_of
from menet.experiments.jobs import Job, Places
from menet.experiments.plan import Plan, Table, graph
from menet.experiments.runner import Engine, Local, Outcome, cores, failures, finished
from menet.experiments.scale import SCALES, Scale, by_name
from menet.files import held
from menet.report.reproduction import publish

SLOWEST = 12
"""Jobs that a dry run names."""


@dataclass(frozen=True)
class Reproduce:
    """Measure tables and figures of the paper, and ours; what is finished is never repeated.

    Everything is kept by the content of its configuration: a model that six tables share is trained once, a
    changed setting repeats just what depends on it, and a stopped run goes on where it was. RESULTS.md shows what
    was measured beside what the paper claims.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """table4, figure6, certificate, …; `--list` shows all."""

    all: bool = False
    """Every table and figure."""

    list: bool = False
    """Show what there is, what each needs and what is already measured, and stop."""

    dry_run: bool = False
    """Show the jobs with estimated time and sizes, and stop."""

    scale: Literal["smoke", "laptop", "paper"] = "smoke"
    """Size of data, networks, trainings and attacks: smoke takes minutes, laptop hours, paper needs GPUs."""

    engine: Literal["local", "ray"] = "local"
    """Run on this machine, or on a Ray cluster (needs the extra `ray`)."""

    workers: int | None = None
    """Jobs side by side on this machine; as many as there are cores if not given."""

    address: str | None = None
    """Address of a Ray cluster; a local one is started if not given."""

    device: str = "cpu"
    """cpu or cuda."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    out: Path = Path("runs/reproduce")
    """Folder of jobs, results and RESULTS.md; for Ray one that all machines see, or any with `--store`."""

    store: str | None = None
    """An fsspec address (s3://…, gs://…, sftp://…, a path) where all jobs are kept as well; machines that share
    it need not share the folder."""

    def __call__(self) -> int:
        scale = by_name(self.scale)
        places = Places(self.out.absolute(), self.root, self.device, address=self.store)
        if self.list:
            show_list(scale, places)
            return 0
        names = tuple(EXPERIMENTS) if self.all else self.names
        if not names:
            raise ConfigurationError("names is empty; name experiments, or use --all or --list")
        plans = [plan_of(name).at(scale) for name in dict.fromkeys(names)]
        jobs = graph(job for plan in plans for job in plan.jobs)
        workers = self.workers or cores()
        if self.dry_run:
            show_estimate(jobs, scale, places, workers)
            return 0
        with held(places.root):
            outcomes = self._engine(workers)(jobs, places, Progress(len(jobs)))
            for plan in plans:
                results.keep(results.summarise(plan, scale, places, outcomes), places)
            pages = publish(places.root, tuple(EXPERIMENTS))
        for failed in failures(outcomes):
            print(f"failed: {failed.title}: {failed.message}; log: {failed.log}")
        lost = sum(one.status == "blocked" for one in outcomes.values())
        if lost:
            print(f"{lost} jobs were not begun, because they need one that failed")
        for page in pages:
            print(f"written: {page}")
        return 1 if failures(outcomes) else 0

    def _engine(self, workers: int) -> Engine:
        if self.engine == "local":
            return Local(workers)
        from menet.experiments.ray_engine import Ray

        return Ray(self.address, workers if self.address is None else None, gpu=self.device != "cpu")


class Progress:
    """One line per job that ran; those kept from before are only counted."""

    def __init__(self, total: int) -> None:
        self.total, self.ended, self.console = total, 0, Console(stderr=True, highlight=False)

    def __call__(self, outcome: Outcome) -> None:
        self.ended += 1
        if outcome.status != "kept":
            words = outcome.message if not outcome.good else f"{outcome.seconds:.1f} s"
            line = f"[{self.ended}/{self.total}] {outcome.status}: {outcome.title} ({words})"
            self.console.print(escape(line), soft_wrap=True)


def show_list(scale: Scale, places: Places) -> None:
    """Print every experiment with what it needs at a scale, and what of it is there."""
    grid = Grid(title=f"scale {scale.name}: {scale.summary}", title_justify="left")
    for heading in ("name", "what", "models", "jobs", "finished", "measured at"):
        grid.add_column(heading, justify="right" if heading in ("models", "jobs", "finished") else "left")
    for name in EXPERIMENTS:
        plan = plan_of(name).at(scale)
        jobs = graph(plan.jobs)
        there = sum(finished(job, places) is not None for job in jobs)
        measured = ", ".join(one for one in SCALES if results.result_path(places, one, name).is_file())
        trained = sum(job.kind == "train" for job in jobs)
        grid.add_row(name, _what(plan), str(trained), str(len(jobs)), str(there), measured or "–")
    Console().print(grid)


def show_estimate(jobs: Sequence[Job], scale: Scale, places: Places, workers: int) -> None:
    """Print the graph by kinds with time, GPU-hours and disk, and the jobs that take longest."""
    speed = estimates.speed_of_a_core()
    waiting = [job for job in jobs if finished(job, places) is None]
    costs = {job.key: estimates.estimate(job) for job in waiting}
    grid = Grid(title=f"scale {scale.name}: {scale.summary}", title_justify="left")
    for heading in ("kind", "jobs", "finished", "hours of one core", "GPU-hours", "disk"):
        grid.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in [*dict.fromkeys(job.kind for job in jobs), "all"]:
        chosen = [job for job in waiting if kind in (job.kind, "all")]
        count = sum(kind in (job.kind, "all") for job in jobs)
        hours = sum(costs[job.key].seconds(speed) for job in chosen) / 3600
        gpu = sum(costs[job.key].gpu_seconds() for job in chosen) / 3600
        disk = sum(costs[job.key].disk for job in chosen)
        there = str(count - len(chosen))
        grid.add_row(
            kind, str(count), there, _number(hours), _number(gpu), _size(disk), end_section=kind == "all"
        )
    console = Console()
    console.print(grid)
    spent = sum(costs[job.key].seconds(speed) for job in waiting) / workers
    console.print(f"about {_duration(spent)} on this machine with {workers} jobs side by side; the longest:")
    for job in sorted(waiting, key=lambda one: -costs[one.key].seconds(speed))[:SLOWEST]:
        edges = " ← " + ", ".join(need.key[:8] for need in job.needs) if job.needs else ""
        line = f"  {job.key[:8]}{edges}  {_duration(costs[job.key].seconds(speed))}  {job.title()}"
        console.print(escape(line), highlight=False, soft_wrap=True)
    listing = places.root / "plans" / f"{scale.name}.json"
    _write_graph(listing, jobs, speed)
    console.print(f"the whole graph: {listing}", soft_wrap=True)


def _write_graph(path: Path, jobs: Sequence[Job], speed: float) -> None:
    from menet.files import write_atomically

    rows = []
    for job in jobs:
        cost = estimates.estimate(job)
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


def _what(plan: Plan) -> str:
    if isinstance(plan, Table):
        extra = sum(cell.ours for cell in plan.cells)
        numbers = f"{len(plan.cells) - extra} of the paper's numbers" + (f", {extra} ours" if extra else "")
        return f"{plan.title} ({numbers if plan.label else f'{extra} numbers, ours'})"
    return plan.title


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.0f} h" if seconds < 2 * 86400 else f"{seconds / 86400:,.0f} days"
