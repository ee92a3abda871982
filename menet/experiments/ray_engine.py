"""The same graph on a Ray cluster: each job a task that waits for its needs, retried when a worker dies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from menet.errors import ConfigurationError
from menet.experiments.jobs import Job, Places
from menet.experiments.runner import LOG, Outcome, Report, blocked, execute

GPU_KINDS = ("train", "evaluate", "certify")


@dataclass(frozen=True)
class Ray:
    """A cluster at `address`, or one of this machine with so many CPUs; all its machines must see the folders."""

    address: str | None = None
    cpus: int | None = None
    gpu: bool = False
    """Whether jobs that run networks ask for a GPU each."""
    retries: int = 3

    def __call__(self, jobs: Sequence[Job], places: Places, report: Report) -> dict[str, Outcome]:
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "engine is 'ray', which is not installed; pip install 'menet[ray]', or use --engine local"
            ) from error
        own = not ray.is_initialized()
        if own:
            ray.init(address=self.address, num_cpus=self.cpus, log_to_driver=False, include_dashboard=False)
        try:
            return self._run(ray, jobs, places, report)
        finally:
            if own:
                ray.shutdown()

    def _run(self, ray: Any, jobs: Sequence[Job], places: Places, report: Report) -> dict[str, Outcome]:
        task = ray.remote(after)
        references: dict[str, Any] = {}
        for job in jobs:
            options = task.options(
                name=f"{job.kind} {job.key[:8]}",
                num_cpus=places.threads,
                num_gpus=1 if self.gpu and job.kind in GPU_KINDS else 0,
                max_retries=self.retries,
            )
            references[job.key] = options.remote(job, places, *(references[need.key] for need in job.needs))
        by_reference = {reference: job for job, reference in zip(jobs, references.values(), strict=True)}
        outcomes: dict[str, Outcome] = {}
        waiting = list(by_reference)
        while waiting:
            (ready, *_), waiting = ray.wait(waiting, num_returns=1)
            job = by_reference[ready]
            try:
                outcome = ray.get(ready)
            except ray.exceptions.RayError as error:
                outcome = _lost(job, places, error, outcomes)
            outcomes[job.key] = outcome
            report(outcome)
        return outcomes


def after(job: Job, places: Places, *needs: Outcome) -> Outcome:
    """Run a job once those it needs have ended; not if one of them ended badly."""
    bad = next((one for one in needs if not one.good), None)
    return execute(job, places) if bad is None else blocked(job, bad)


def _lost(job: Job, places: Places, error: Exception, outcomes: dict[str, Outcome]) -> Outcome:
    """The outcome of a task that has none of its own: its worker died too often, or what it needs did."""
    bad = next((one for need in job.needs if (one := outcomes.get(need.key)) and not one.good), None)
    if bad is not None:
        return blocked(job, bad)
    words = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
    return Outcome(job.key, job.title(), "failed", message=words, log=places.folder(job) / LOG)
