"""Running a graph of jobs: finished ones are never repeated, a failed one stops only what needs it."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TextIO, runtime_checkable

import torch

from menet.errors import ConfigurationError, MenetError
from menet.experiments.jobs import DONE, Job, Places
from menet.files import write_atomically

LOG, DESCRIPTION = "log.txt", "job.json"
RETRIES = 2
"""How often a job is tried again whose process died; one that raised an error is not."""

Status = Literal["kept", "done", "failed", "blocked"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `kept` was finished before, `blocked` never began because something it needs failed."""

    key: str
    title: str
    status: Status
    seconds: float = 0.0
    message: str = ""
    log: Path | None = None

    @property
    def good(self) -> bool:
        return self.status in ("kept", "done")


Report = Callable[[Outcome], None]


@runtime_checkable
class Engine(Protocol):
    """What runs a graph, given in an order in which nothing stands before what it needs."""

    def __call__(self, jobs: Sequence[Job], places: Places, report: Report) -> dict[str, Outcome]: ...


def finished(job: Job, places: Places) -> float | None:
    """The seconds that a finished job took; None for one that is not finished."""
    here, store = places.folder(job) / DONE, places.store
    for read in (here.read_bytes, lambda: store and store.read(f"{places.name(job)}/{DONE}")):
        try:
            marker = json.loads(read() or b"{}")
            if marker["key"] == job.key:
                return float(marker["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def execute(job: Job, places: Places) -> Outcome:
    """Run one job in its folder, where its log is, and mark it done; its needs must be finished.

    All its output goes to the log. The marker is written last and whole, so a job that was killed is not done,
    and is taken up again from what it left.
    """
    folder = places.folder(job)
    if finished(job, places) is not None:
        return Outcome(job.key, job.title(), "kept")
    store = places.store
    if store is None:
        return _execute(job, folder, places)
    if not folder.exists():
        # What a machine that is gone has left of this job is where to go on.
        store.bring(places.name(job), folder, DONE)
    with store.mirroring(places.name(job), folder, DONE):
        return _execute(job, folder, places)


def _execute(job: Job, folder: Path, places: Places) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    description = {"kind": job.kind, "title": job.title(), "key": job.key, **job.content()}
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=1, ensure_ascii=False))
    log = folder / LOG
    began = time.perf_counter()
    torch.set_num_threads(places.threads)
    with log.open("a", encoding="utf-8") as lines, _captured(lines):
        try:
            job.run(folder, places)
        except Exception as error:  # whatever a job dies of, the others go on; nothing is lost, it is in the log
            traceback.print_exc(file=lines)
            words = str(error) if isinstance(error, MenetError) else f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - began
            return Outcome(job.key, job.title(), "failed", seconds, " ".join(words.split())[:300], log)
    seconds = time.perf_counter() - began
    marker = {"key": job.key, "seconds": round(seconds, 3)}
    write_atomically(folder / DONE, json.dumps(marker))
    return Outcome(job.key, job.title(), "done", seconds, log=log)


def blocked(job: Job, by: Outcome) -> Outcome:
    """The outcome of a job that needs one that did not end well."""
    cause = by.message if by.status == "blocked" else f"{by.title} failed"
    return Outcome(job.key, job.title(), "blocked", message=cause, log=by.log)


@dataclass(frozen=True)
class Local:
    """This machine: one job after another in this process, or several processes side by side."""

    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"workers is {self.workers}; accepted are whole numbers from 1")

    def __call__(self, jobs: Sequence[Job], places: Places, report: Report) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        waiting = []
        for job in jobs:
            if finished(job, places) is None:
                waiting.append(job)
            else:
                _note(outcomes, Outcome(job.key, job.title(), "kept"), report)
        pool: ProcessPoolExecutor | None = None
        running: dict[Future[Outcome], Job] = {}
        tries: dict[str, int] = {}
        try:
            while waiting or running:
                ready = _settle(waiting, outcomes, report)
                if self.workers == 1:
                    if ready:
                        waiting.remove(ready[0])
                        _note(outcomes, execute(ready[0], places), report)
                    continue
                pool = pool or _pool(self.workers)
                for job in ready[: self.workers - len(running)]:
                    waiting.remove(job)
                    running[pool.submit(execute, job, places)] = job
                if not running:
                    continue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        _note(outcomes, future.result(), report)
                    except BrokenProcessPool:
                        pool = None
                        tries[job.key] = tries.get(job.key, 0) + 1
                        if tries[job.key] > RETRIES:
                            _note(outcomes, _died(job, places, tries[job.key]), report)
                        else:
                            waiting.insert(0, job)
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        return outcomes


def _settle(waiting: list[Job], outcomes: dict[str, Outcome], report: Report) -> list[Job]:
    """Take out of `waiting` what is blocked; return what can start now."""
    ready = []
    for job in list(waiting):
        needs = [outcomes.get(need.key) for need in job.needs]
        bad = next((one for one in needs if one is not None and not one.good), None)
        if bad is not None:
            waiting.remove(job)
            _note(outcomes, blocked(job, bad), report)
        elif all(one is not None for one in needs):
            ready.append(job)
    return ready


def _note(outcomes: dict[str, Outcome], outcome: Outcome, report: Report) -> None:
    outcomes[outcome.key] = outcome
    report(outcome)


def _died(job: Job, places: Places, tries: int) -> Outcome:
    message = f"its process died {tries} times"
    return Outcome(job.key, job.title(), "failed", message=message, log=places.folder(job) / LOG)


def _pool(workers: int) -> ProcessPoolExecutor:
    # Forking a process whose torch has threads hangs its children.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _leave_with_parent)


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone, or two runs would write to one folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _captured(lines: TextIO) -> Iterator[None]:
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        yield


def failures(outcomes: Mapping[str, Outcome]) -> tuple[Outcome, ...]:
    """The jobs that failed themselves, each with its log."""
    return tuple(one for one in outcomes.values() if one.status == "failed")


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
