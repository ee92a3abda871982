"""The same graph on a Ray cluster: a job is a task that waits for its needs and is retried if its worker dies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from menet.errors import require
from menet.experiments.jobs import Job, Workspace
from menet.experiments.runner import LOG, Callback, JobOutcome, blocked, execute

GPU_KINDS = ("train", "evaluate", "certify")


@dataclass(frozen=True)
class Ray:
    """The Ray cluster at `address`, or a local one of `cpus` CPUs.

    All its machines must see the workspace's folders, or share its store.
    """

    address: str | None = None
    cpus: int | None = None
    gpu: bool = False
    """Whether each job that runs a network requests a GPU."""
    retries: int = 3

    def __call__(self, jobs: Sequence[Job], workspace: Workspace, on_outcome: Callback) -> dict[str, JobOutcome]:
        ray = require("ray", extra="ray")
        own = not ray.is_initialized()
        if own:
            ray.init(address=self.address, num_cpus=self.cpus, log_to_driver=False, include_dashboard=False)
        try:
            return self._run(ray, jobs, workspace, on_outcome)
        finally:
            if own:
                ray.shutdown()

    def _run(
        self, ray: Any, jobs: Sequence[Job], workspace: Workspace, on_outcome: Callback
    ) -> dict[str, JobOutcome]:
        task = ray.remote(after)
        references: dict[str, Any] = {}
        for job in jobs:
            options = task.options(
                name=f"{job.kind} {job.key[:8]}",
                num_cpus=workspace.threads,
                num_gpus=1 if self.gpu and job.kind in GPU_KINDS else 0,
                max_retries=self.retries,
            )
            references[job.key] = options.remote(job, workspace, *(references[need.key] for need in job.needs))
        by_reference = {reference: job for job, reference in zip(jobs, references.values(), strict=True)}
        outcomes: dict[str, JobOutcome] = {}
        waiting = list(by_reference)
        while waiting:
            (ready, *_), waiting = ray.wait(waiting, num_returns=1)
            job = by_reference[ready]
            try:
                outcome = ray.get(ready)
            except ray.exceptions.RayError as error:
                outcome = _lost(job, workspace, error, outcomes)
            outcomes[job.key] = outcome
            on_outcome(outcome)
        return outcomes


def after(job: Job, workspace: Workspace, *needs: JobOutcome) -> JobOutcome:
    """Run a job after those it needs, unless one of them failed."""
    failed = next((one for one in needs if not one.succeeded), None)
    return execute(job, workspace) if failed is None else blocked(job, failed)


def _lost(job: Job, workspace: Workspace, error: Exception, outcomes: dict[str, JobOutcome]) -> JobOutcome:
    """The outcome of a task that returned none: its worker died too often, or that of a job it needs did."""
    failed = next((one for need in job.needs if (one := outcomes.get(need.key)) and not one.succeeded), None)
    if failed is not None:
        return blocked(job, failed)
    words = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
    return JobOutcome(job.key, job.title(), "failed", message=words, log=workspace.folder(job) / LOG)
