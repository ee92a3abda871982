"""`menet reproduce`: tables and figures of the paper, measured and put beside the paper's numbers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from menet.commands.options import Root, Tables
from menet.errors import ConfigurationError

if TYPE_CHECKING:
    from menet.experiments.jobs import Job, Workspace
    from menet.experiments.plan import Experiment
    from menet.experiments.runner import Engine, JobOutcome
    from menet.experiments.scale import Scale
    from menet.report.tables import Table

LONGEST = 12
"""Jobs that a dry run names."""


@dataclass(frozen=True)
class Reproduce:
    """Measure tables and figures of the paper, and further ones; finished jobs are never repeated.

    Results are stored by the hash of their configuration: a model that six tables share is trained once, and a
    changed setting repeats only what depends on it. Safe to interrupt: rerun the same command to resume.
    RESULTS.md shows our numbers beside the paper's.
    """

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]", help_behavior_hint="")
    ] = ()
    """table4, figure6, certificate, …; --list shows all."""

    all: bool = False
    """Every table and figure."""

    list: bool = False
    """List the experiments, what each needs and what is already measured, then exit."""

    dry_run: bool = False
    """Show the jobs with estimated time and disk space, then exit."""

    scale: Literal["smoke", "laptop", "paper"] = "smoke"
    """Size of data, networks, training and attacks: smoke takes minutes, laptop hours, paper needs GPUs."""

    engine: Literal["local", "ray"] = "local"
    """Run on this machine or on a Ray cluster (needs pip install 'menet[ray]')."""

    workers: int | None = None
    """Jobs in parallel on this machine. Default: the number of cores."""

    address: str | None = None
    """Address of a Ray cluster. Default: start a local one."""

    device: str = "cpu"
    """cpu or cuda."""

    root: Root = None

    out: Path = Path("runs/reproduce")
    """Folder of jobs, results and RESULTS.md; with Ray one that all machines share, or any with --store."""

    tables: Tables = ()
    """Also write every table in these formats."""

    store: str | None = None
    """Remote store of all jobs (s3://…, sftp://… or another fsspec address), instead of a shared folder."""

    def __call__(self) -> int:
        from menet.experiments import EXPERIMENTS, experiment
        from menet.experiments.jobs import Workspace
        from menet.experiments.plan import graph, save_summary, summarize
        from menet.experiments.runner import cores, failures
        from menet.experiments.scale import by_name
        from menet.files import locked

        if self.device != "cpu":
            from menet.commands.options import device_of

            device_of(self.device)
        scale = by_name(self.scale)
        places = Workspace(self.out.absolute(), self.root, self.device, address=self.store)
        if self.list:
            _experiments_table(scale, places).print()
            return 0
        names = tuple(EXPERIMENTS) if self.all else self.names
        if not names:
            raise ConfigurationError("expected the name of an experiment, or --all; --list shows them")
        plans = [experiment(name).at(scale) for name in dict.fromkeys(names)]
        jobs = graph(job for plan in plans for job in plan.jobs)
        workers = cores() if self.workers is None else self.workers
        if self.dry_run:
            _show_cost(jobs, scale, places, workers)
            return 0
        from menet.report.reproduction import publish

        with locked(places.root):
            outcomes = self._engine(workers)(jobs, places, _JobLines(len(jobs)))
            for plan in plans:
                save_summary(summarize(plan, scale, places, outcomes), places)
            pages = publish(places.root, tuple(EXPERIMENTS), self.tables)
        for failed in failures(outcomes):
            print(f"failed: {failed.title}: {failed.message}; log: {failed.log}")
        lost = sum(one.status == "blocked" for one in outcomes.values())
        if lost:
            print(f"{lost} jobs were skipped, because they depend on a failed one")
        for page in pages:
            print(f"written: {page}")
        return 1 if failures(outcomes) else 0

    def _engine(self, workers: int) -> "Engine":
        if self.engine == "local":
            from menet.experiments.runner import Local

            return Local(workers)
        from menet.experiments.runner import Ray

        return Ray(self.address, workers if self.address is None else None, gpu=self.device != "cpu")


class _JobLines:
    """Prints one line per job that ran; those finished before are only counted."""

    def __init__(self, total: int) -> None:
        self.total, self.ended, self.console = total, 0, Console(stderr=True, highlight=False)

    def __call__(self, outcome: "JobOutcome") -> None:
        self.ended += 1
        if outcome.status != "kept":
            words = outcome.message if not outcome.succeeded else f"{outcome.seconds:.1f} s"
            line = f"[{self.ended}/{self.total}] {outcome.status}: {outcome.title} ({words})"
            self.console.print(escape(line), soft_wrap=True)


def _experiments_table(scale: "Scale", places: "Workspace") -> "Table":
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


def _show_cost(jobs: Sequence["Job"], scale: "Scale", places: "Workspace", workers: int) -> None:
    """Print the jobs by kind with time, GPU-hours and disk space, and the longest ones; write the whole graph."""
    from menet.experiments import cost_model
    from menet.experiments.runner import finished
    from menet.progress import format_duration
    from menet.report.tables import Cell, Table

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


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
