"""Running a graph of jobs, on this machine or on a Ray cluster.

Finished jobs are never repeated, and a failed one blocks only those that need it.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import torch

from menet.errors import ConfigurationError, MenetError, require
from menet.experiments.jobs import DONE, Job, Workspace
from menet.files import write_atomically

LOG, DESCRIPTION = "log.txt", "job.json"
RETRIES = 2
"""How often a job is retried if its process died; a job that raised an error is not retried."""
GPU_KINDS = ("prepare", "train", "evaluate", "part", "certify", "vectors", "redistributed", "cost")
"""Kinds of jobs that run on the device; the others need no GPU."""

Status = Literal["kept", "done", "failed", "blocked"]


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: `kept` was finished before, `blocked` was not started because a job it needs failed."""

    key: str
    title: str
    status: Status
    seconds: float = 0.0
    message: str = ""
    log: Path | None = None

    @property
    def succeeded(self) -> bool:
        return self.status in ("kept", "done")


Callback = Callable[[JobOutcome], None]


class Engine(Protocol):
    """Runs a graph of jobs, given in an order in which each comes after those it needs."""

    def __call__(
        self, jobs: Sequence[Job], workspace: Workspace, on_outcome: Callback
    ) -> dict[str, JobOutcome]: ...


def finished(job: Job, workspace: Workspace) -> float | None:
    """The seconds that a finished job took; None if it is not finished."""
    here, store = workspace.folder(job) / DONE, workspace.store
    for read in (here.read_bytes, lambda: store and store.read(f"{workspace.name(job)}/{DONE}")):
        try:
            marker = json.loads(read() or b"{}")
            if marker["key"] == job.key:
                return float(marker["seconds"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def execute(job: Job, workspace: Workspace) -> JobOutcome:
    """Run one job in its folder and mark it done; the jobs it needs must be finished.

    All its output goes to the log in that folder. The marker is written last and atomically, so a job that was
    killed is not done, and the next run resumes it.
    """
    folder = workspace.folder(job)
    if finished(job, workspace) is not None:
        return JobOutcome(job.key, job.title(), "kept")
    store = workspace.store
    if store is None:
        return _execute(job, folder, workspace)
    if not folder.exists():
        # Another machine may have started this job: resume from what it uploaded.
        store.download(workspace.name(job), folder, DONE)
    with store.mirroring(workspace.name(job), folder, DONE):
        return _execute(job, folder, workspace)


def _execute(job: Job, folder: Path, workspace: Workspace) -> JobOutcome:
    folder.mkdir(parents=True, exist_ok=True)
    description = {"kind": job.kind, "title": job.title(), "key": job.key, **job.content()}
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=1, ensure_ascii=False))
    log = folder / LOG
    began = time.perf_counter()
    torch.set_num_threads(workspace.threads)
    with log.open("a", encoding="utf-8") as lines, _captured(lines):
        try:
            job.run(folder, workspace)
        except Exception as error:  # a failed job must not stop the others; the log has the traceback
            traceback.print_exc(file=lines)
            words = str(error) if isinstance(error, MenetError) else f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - began
            return JobOutcome(job.key, job.title(), "failed", seconds, " ".join(words.split())[:300], log)
    seconds = time.perf_counter() - began
    marker = {"key": job.key, "seconds": round(seconds, 3)}
    write_atomically(folder / DONE, json.dumps(marker))
    return JobOutcome(job.key, job.title(), "done", seconds, log=log)


def blocked(job: Job, by: JobOutcome) -> JobOutcome:
    """The outcome of a job that needs one that failed or was blocked."""
    cause = by.message if by.status == "blocked" else f"{by.title} failed"
    return JobOutcome(job.key, job.title(), "blocked", message=cause, log=by.log)


def needs_gpu(job: Job) -> bool:
    """Whether a job uses the device; gathering the rows of parts does not."""
    return job.kind in GPU_KINDS and not getattr(job, "parts", ())


@dataclass(frozen=True)
class Local:
    """This machine: one job after another in this process, or `workers` processes in parallel.

    With `gpus`, jobs that use one are given one of them, `jobs_per_gpu` at a time to each; the other jobs run
    beside them on the CPU.
    """

    workers: int = 1
    gpus: tuple[str, ...] = ()
    """Devices: cuda:0, cuda:1, …"""
    jobs_per_gpu: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "jobs_per_gpu"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {getattr(self, name)}")

    def __call__(self, jobs: Sequence[Job], workspace: Workspace, on_outcome: Callback) -> dict[str, JobOutcome]:
        outcomes: dict[str, JobOutcome] = {}
        waiting = []
        for job in jobs:
            if finished(job, workspace) is None:
                waiting.append(job)
            else:
                _note(outcomes, JobOutcome(job.key, job.title(), "kept"), on_outcome)
        pool: ProcessPoolExecutor | None = None
        running: dict[Future[JobOutcome], tuple[Job, str | None]] = {}
        free = list(self.gpus) * self.jobs_per_gpu
        attempts: dict[str, int] = {}
        try:
            while waiting or running:
                ready = _settle(waiting, outcomes, on_outcome)
                if self.workers == 1:
                    if ready:
                        waiting.remove(ready[0])
                        place = self._place(workspace, next(iter(free), None))
                        _note(outcomes, execute(ready[0], place), on_outcome)
                    continue
                pool = pool or _pool(self.workers)
                for job in ready:
                    uses = bool(self.gpus) and needs_gpu(job)
                    if len(running) == self.workers or (uses and not free):
                        continue
                    gpu = free.pop(0) if uses else None
                    waiting.remove(job)
                    running[pool.submit(execute, job, self._place(workspace, gpu))] = (job, gpu)
                if not running:
                    continue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, gpu = running.pop(future)
                    if gpu is not None:
                        free.append(gpu)
                    try:
                        _note(outcomes, future.result(), on_outcome)
                    except BrokenProcessPool:
                        pool = None
                        attempts[job.key] = attempts.get(job.key, 0) + 1
                        if attempts[job.key] > RETRIES:
                            _note(outcomes, _died(job, workspace, attempts[job.key]), on_outcome)
                        else:
                            waiting.insert(0, job)
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        return outcomes

    def _place(self, workspace: Workspace, gpu: str | None) -> Workspace:
        return replace(workspace, device=gpu or "cpu") if self.gpus else workspace


def _settle(waiting: list[Job], outcomes: dict[str, JobOutcome], on_outcome: Callback) -> list[Job]:
    """Remove blocked jobs from `waiting`; return those that can start now."""
    ready = []
    for job in list(waiting):
        needs = [outcomes.get(need.key) for need in job.needs]
        failed = next((one for one in needs if one is not None and not one.succeeded), None)
        if failed is not None:
            waiting.remove(job)
            _note(outcomes, blocked(job, failed), on_outcome)
        elif all(one is not None for one in needs):
            ready.append(job)
    return ready


def _note(outcomes: dict[str, JobOutcome], outcome: JobOutcome, on_outcome: Callback) -> None:
    outcomes[outcome.key] = outcome
    on_outcome(outcome)


def _died(job: Job, workspace: Workspace, attempts: int) -> JobOutcome:
    message = f"its process died {attempts} times"
    return JobOutcome(job.key, job.title(), "failed", message=message, log=workspace.folder(job) / LOG)


def _pool(workers: int) -> ProcessPoolExecutor:
    # Forking a process whose torch has threads hangs its children.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _leave_with_parent)


def _leave_with_parent() -> None:
    """End this process with its parent; otherwise a second run could write to the same folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Ray:
    """The Ray cluster at `address`, or a local one of `cpus` CPUs; a job is a task that waits for its needs.

    All its machines must see the workspace's folders, or share its store.
    """

    address: str | None = None
    cpus: int | None = None
    gpu: bool = False
    """Whether each job that uses the device requests a GPU."""
    jobs_per_gpu: int = 1
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
                num_gpus=1 / self.jobs_per_gpu if self.gpu and needs_gpu(job) else 0,
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


@contextlib.contextmanager
def _captured(lines: TextIO) -> Iterator[None]:
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        yield


def failures(outcomes: Mapping[str, JobOutcome]) -> tuple[JobOutcome, ...]:
    """The jobs that failed (not those they blocked), each with its log."""
    return tuple(one for one in outcomes.values() if one.status == "failed")
