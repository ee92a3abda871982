"""`menet reproduce`: tables and figures of the paper, measured and put beside the paper's numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from menet.commands.choices import Root
from menet.errors import ConfigurationError

if TYPE_CHECKING:
    from menet.experiments.runner import Engine


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

    store: str | None = None
    """Remote store of all jobs (s3://…, sftp://… or another fsspec address), instead of a shared folder."""

    def __call__(self) -> int:
        from menet.experiments import EXPERIMENTS, experiment, results
        from menet.experiments.jobs import Workspace
        from menet.experiments.plan import graph
        from menet.experiments.runner import cores, failures
        from menet.experiments.scale import by_name
        from menet.files import locked
        from menet.report.plans import JobLines, experiments_table, show_cost

        if self.device != "cpu":
            from menet.commands.loading import device_of

            device_of(self.device)
        scale = by_name(self.scale)
        places = Workspace(self.out.absolute(), self.root, self.device, address=self.store)
        if self.list:
            experiments_table(scale, places).print()
            return 0
        names = tuple(EXPERIMENTS) if self.all else self.names
        if not names:
            raise ConfigurationError("expected the name of an experiment, or --all; --list shows them")
        plans = [experiment(name).at(scale) for name in dict.fromkeys(names)]
        jobs = graph(job for plan in plans for job in plan.jobs)
        workers = self.workers or cores()
        if self.dry_run:
            show_cost(jobs, scale, places, workers)
            return 0
        from menet.report.reproduction import publish

        with locked(places.root):
            outcomes = self._engine(workers)(jobs, places, JobLines(len(jobs)))
            for plan in plans:
                results.save_summary(results.summarize(plan, scale, places, outcomes), places)
            pages = publish(places.root, tuple(EXPERIMENTS))
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
        from menet.experiments.ray_engine import Ray

        return Ray(self.address, workers if self.address is None else None, gpu=self.device != "cpu")
