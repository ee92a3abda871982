"""`menet reproduce`: tables and figures of the paper, measured and put beside the paper's numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from menet.commands import Csv, Json, Latex, Output, printing
from menet.commands.options import Root, Tables
from menet.errors import ConfigurationError
from menet.progress import format_bytes

if TYPE_CHECKING:
    from menet.experiments.jobs import Job
    from menet.experiments.plan import Experiment
    from menet.experiments.runner import Engine, JobOutcome
    from menet.experiments.scale import Scale

PART_HOURS = 4.0
"""Hours of a part of an evaluation, by estimate, where several can run side by side."""


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
    """Show the jobs with estimated time, memory and disk space, then exit; needs no GPU."""

    scale: Literal["smoke", "laptop", "cores", "gpu-day", "paper"] = "smoke"
    """Size of data, networks, training and attacks: smoke takes minutes, laptop hours, cores days on a few cores,
    gpu-day a day or two on one GPU, paper weeks."""

    datasets: tuple[str, ...] = ()
    """Only what is measured on these: mnist, cifar10, svhn, tiny-imagenet."""

    match: tuple[str, ...] = ()
    """Only cells whose table, row, column and job at the paper's scale have all of these texts ('p 0.4→0.6')."""

    without_extensions: bool = False
    """Leave out the columns that the paper does not have."""

    missing: bool = False
    """Only cells that the published tables (--results) do not have: to go on in a new folder."""

    examples: int | None = None
    """Attack this many test images. Default: as many as the scale has."""

    max_batch: int | None = None
    """Images per forward pass of attacks and scoring, for a GPU with little memory. Changes the jobs."""

    engine: Literal["local", "ray"] = "local"
    """Run on this machine or on a Ray cluster (needs pip install 'menet[ray]')."""

    workers: int | None = None
    """Jobs in parallel on this machine, those on GPUs included. Default: the number of cores."""

    threads: int = 1
    """Threads of each job."""

    bfloat16: bool = False
    """Attack ME-Nets in bfloat16, in about half the time on processors with such instructions; scores stay in
    float32, and tables say so."""

    shipped: bool = False
    """Take a network that ships with the package (`menet models list`) where it was trained with the same
    settings and seed, instead of training it again: the packed one, as tables say."""

    address: str | None = None
    """Address of a Ray cluster. Default: start a local one."""

    device: str = "auto"
    """cpu, cuda or cuda:1, for training and evaluation alike. auto: cuda where there is a GPU, else cpu."""

    gpus: int | None = None
    """GPUs of this machine to use. Default: all."""

    jobs_per_gpu: int = 1
    """Jobs at a time on one GPU; --dry-run shows the memory they need."""

    part_hours: float | None = None
    """Split evaluations into jobs of about this many hours that run side by side. Default: 4 on a cluster or with
    several GPUs, else no splitting."""

    root: Root = None

    out: Path = Path("runs/reproduce")
    """Folder of jobs, results and RESULTS.md; with Ray one that all machines share, or any with --store."""

    tables: Tables = ()
    """Also write every table in these formats."""

    results: Path = Path("results/paper")
    """Folder of published tables (`menet publish`), which --list counts as measured too."""

    store: str | None = None
    """Remote store of all jobs (s3://…, sftp://… or another fsspec address), instead of a shared folder."""

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.distributed import cores
        from menet.experiments import EXPERIMENTS, experiment
        from menet.experiments.jobs import Workspace
        from menet.experiments.plan import save_summary, summarize
        from menet.experiments.runner import failures
        from menet.experiments.scale import by_name
        from menet.files import locked

        scale = by_name(self.scale).sized(self.examples, self.max_batch)
        device = _device_name(self.device)
        places = Workspace(
            self.out.absolute(), self.root, device, self.threads, self.bfloat16, self.shipped, address=self.store
        )
        if self.list:
            from menet.report.plans import experiments_table

            table, words = experiments_table(scale, places, self.results)
            out.table(table)
            out.value(measured=words)
            print(words)
            return 0
        names = tuple(EXPERIMENTS) if self.all else self.names
        if misplaced := [name for name in self.datasets if name in EXPERIMENTS]:
            raise ConfigurationError(
                f"expected names of datasets after --datasets, got the experiment {misplaced[0]!r}; "
                f"experiments go first: menet reproduce {misplaced[0]} --datasets …"
            )
        if not names:
            raise ConfigurationError("expected the name of an experiment, or --all; --list shows them")
        whole = [experiment(name) for name in dict.fromkeys(names)]
        chosen = [plan.select(self._keeps(plan, scale)) for plan in whole]
        if not any(plan.jobs for plan in chosen):
            raise ConfigurationError("expected cells that --datasets, --match and --missing leave; got none")
        gpus = _gpus(device, self.gpus, planning=self.dry_run)
        jobs = self._graph(chosen, scale, gpus)
        if self.workers is not None and self.workers < 1:
            raise ConfigurationError(f"expected workers >= 1, got {self.workers}")
        workers = self.workers or cores()
        if self.dry_run:
            costs = [(plan.name, self._graph([plan], scale, gpus)) for plan in chosen]
            unfiltered = [(plan.name, self._graph([plan], by_name(self.scale), gpus)) for plan in whole]
            from menet.report.plans import Resources, planned_cost

            resources = Resources(workers, gpus, self.jobs_per_gpu)
            cost, console = planned_cost(jobs, costs, unfiltered, scale, places, resources), Console()
            out.table(cost.by_experiment, console)
            out.table(cost.by_kind, console)
            for line in cost.lines:
                console.print(escape(line), highlight=False, soft_wrap=True)
            return 0
        from menet.report.reproduction import publish

        _check_memory(jobs, gpus, self.jobs_per_gpu)
        with locked(places.root):
            outcomes = self._engine(workers, gpus)(jobs, places, _JobLines(len(jobs)))
            for plan in whole:
                # Of the whole table: what was left out now may have been measured before.
                save_summary(summarize(plan.at(scale), scale, places, outcomes), places)
            pages = publish(places.root, tuple(EXPERIMENTS), self.tables)
        out.value(written=pages, failed=[one.title for one in failures(outcomes)])
        for failed in failures(outcomes):
            print(f"failed: {failed.title}: {failed.message}; log: {failed.log}")
        lost = sum(one.status == "blocked" for one in outcomes.values())
        if lost:
            print(f"{lost} jobs were skipped, because they depend on a failed one")
        for page in pages:
            print(f"written: {page}")
        return 1 if failures(outcomes) else 0

    def _keeps(self, plan: "Experiment", scale: "Scale") -> "Callable[[str, Job, bool], bool]":
        """Whether the options leave a cell or a picture, by its words, its job and whether it is an extension."""
        from menet.experiments.jobs import Workspace, transformed
        from menet.experiments.plan import NAMES, datasets_of
        from menet.report.reproduction import measured_jobs

        unknown = sorted(set(self.datasets) - NAMES.keys())
        if unknown:
            raise ConfigurationError(f"unknown dataset {unknown[0]!r}; choose from {', '.join(NAMES)}")

        there = measured_jobs(plan.name, scale.name, self.results) if self.missing else set()

        def keeps(words: str, job: "Job", ours: bool) -> bool:
            if there and Workspace(self.results).name(transformed(job, scale)) in there:
                return False
            if self.datasets and not datasets_of(job) <= set(self.datasets):
                return False
            # An experiment that is not in the paper is asked for by its name.
            if self.without_extensions and ours and plan.label is not None:
                return False
            text = f"{plan.name} {plan.title} {words} {job.title()}".casefold()
            return all(part.casefold() in text for part in self.match)

        return keeps

    def _graph(self, plans: Sequence["Experiment"], scale: "Scale", gpus: tuple[str, ...]) -> tuple["Job", ...]:
        """The jobs of experiments at a scale, with long evaluations split where several can run."""
        from menet.experiments import cost_model
        from menet.experiments.jobs import Evaluate, split_evaluations
        from menet.experiments.plan import graph

        jobs = [job for plan in plans for job in plan.at(scale).jobs]
        hours = self.part_hours or (PART_HOURS if self.engine == "ray" or len(gpus) > 1 else None)
        if hours is None:
            return graph(jobs)
        if not hours > 0:
            raise ConfigurationError(f"expected part-hours > 0, got {hours}")

        def parts(job: Evaluate) -> int:
            return cost_model.parts_of(job, hours, gpu=bool(gpus))

        return graph(split_evaluations(job, parts) for job in jobs)

    def _engine(self, workers: int, gpus: tuple[str, ...]) -> "Engine":
        if self.engine == "local":
            from menet.experiments.runner import Local

            return Local(workers, gpus, self.jobs_per_gpu)
        from menet.experiments.runner import Ray

        return Ray(
            self.address,
            workers if self.address is None else None,
            gpu=bool(gpus),
            jobs_per_gpu=self.jobs_per_gpu,
        )


def _device_name(name: str) -> str:
    """The device that is meant; that this machine has it is checked when something is to run on it."""
    if name == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _gpus(device: str, wanted: int | None, *, planning: bool) -> tuple[str, ...]:
    """The GPUs to use, none for the CPU; a plan needs no GPU and assumes one where there is none."""
    if not planning:
        from menet.commands.options import device_of

        device_of(device)
    if not device.startswith("cuda"):
        return ()
    import torch

    if ":" in device:
        return (device,)
    count = wanted or torch.cuda.device_count() or 1
    if not planning and count > torch.cuda.device_count():
        raise ConfigurationError(f"expected gpus <= {torch.cuda.device_count()}, got {count}")
    return tuple(f"cuda:{number}" for number in range(count))


def _check_memory(jobs: Sequence["Job"], gpus: tuple[str, ...], jobs_per_gpu: int) -> None:
    """Warn before hours are spent if the jobs of a GPU may not fit on it together."""
    if not gpus:
        return
    import torch

    from menet.experiments import cost_model

    needed = jobs_per_gpu * max(map(cost_model.memory_of, jobs), default=0.0)
    there = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    if needed > there:
        print(
            f"about {format_bytes(needed)} of GPU memory needed, {format_bytes(there)} there: jobs may run out "
            "of memory; use fewer --jobs-per-gpu or a smaller --max-batch"
        )


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
