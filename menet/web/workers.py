"""The processes that compute for the page, within limits on all that a request may cost.

Two workers: one answers sliders, the other runs attacks and certificates, so that a slow attack does not keep a
slider waiting. A job that takes too long, or a worker that dies, costs that worker, which is replaced; nothing
else is lost. Workers end when the pipe to the server closes, however the server ends.
"""

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from menet.errors import MenetError

if TYPE_CHECKING:
    from menet.web.explorer import Networks

MAX_UPLOAD = 8 << 20
"""Bytes of an uploaded file."""
SECONDS_TO_START = 300.0
"""A worker imports torch and, the first time, compiles the estimators' loops."""

LANES = {
    "about": 0,
    "upload": 0,
    "reconstruct": 0,
    "attack": 1,
    "certificate": 1,
    "paint": 1,
}
"""Which worker answers which request."""


@dataclass(frozen=True)
class Limits:
    """What one request may cost, and how many may wait."""

    seconds: float = 30.0
    """Of computation, after which the worker is stopped."""
    memory: int = 2048
    """Megabytes that a worker may allocate beyond what it has when it is ready."""
    waiting: int = 48
    """Requests that wait for one worker; more are told to try again."""


class Refused(Exception):
    """A request that is answered by a message and not by a result."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Worker:
    """A process that computes one job at a time, within limits; one that had to be stopped is replaced."""

    def __init__(self, work: Callable[..., None], arguments: tuple[Any, ...], limits: Limits) -> None:
        self.work, self.arguments, self.limits = work, arguments, limits
        self._places = threading.BoundedSemaphore(limits.waiting)
        self._turn = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._closed = False

    def ask(self, action: str, request: dict[str, Any]) -> Any:
        """The worker's answer; `Refused` if it is busy, too slow, out of memory, or the request is invalid."""
        busy = Refused(HTTPStatus.SERVICE_UNAVAILABLE, "many requests are waiting; please try again in a moment")
        if not self._places.acquire(blocking=False):
            raise busy
        try:
            if not self._turn.acquire(timeout=4 * self.limits.seconds):
                raise busy
            try:
                return self._answer(action, request)
            finally:
                self._turn.release()
        finally:
            self._places.release()

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        with self._turn:
            self._ready()

    def close(self) -> None:
        """Stop the process, whatever it is doing."""
        self._closed = True
        self._stop()

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return self._process.pid if self._process is not None else None

    def _answer(self, action: str, request: dict[str, Any]) -> Any:
        pipe = self._ready()
        try:
            pipe.send((action, request))
            if not pipe.poll(self.limits.seconds):
                self._stop()
                raise Refused(
                    HTTPStatus.GATEWAY_TIMEOUT,
                    f"this takes more than {self.limits.seconds:g} seconds; please choose fewer steps or draws",
                )
            kind, answer = pipe.recv()
        except (EOFError, OSError) as error:
            self._stop()
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE, "the computation was stopped; please try again with less"
            ) from error
        if kind == "answer":
            return answer
        if kind == "fault":
            print(answer, file=sys.stderr, flush=True)
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "this failed here; the terminal shows why")
        raise Refused(HTTPStatus.BAD_REQUEST if kind == "error" else HTTPStatus.SERVICE_UNAVAILABLE, answer)

    def _ready(self) -> Connection:
        if self._closed:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
        if self._pipe is not None and self._process.is_alive():
            return self._pipe
        self._stop()
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(
            target=self.work, args=(other, self.limits.memory, *self.arguments), daemon=True
        )
        process.start()
        other.close()
        self._process, self._pipe = process, pipe
        try:
            kind, message = pipe.recv() if pipe.poll(SECONDS_TO_START) else ("error", "it did not start in time")
        except (EOFError, OSError):
            kind, message = "error", "it could not start"
        if kind != "ready":
            self._stop()
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, message)
        return pipe

    def _stop(self) -> None:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is not None:
            process.kill()
            process.join(5)
        # Last, since another thread may be waiting for the pipe: the end of the process wakes it.
        if pipe is not None:
            pipe.close()


def explore(pipe: Connection, memory: int, networks: "Networks") -> None:
    """The main function of a worker: load the networks, then answer until the server closes the pipe."""
    # Ctrl-C reaches every process of the terminal; the server decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch

        from menet.web.explorer import ESTIMATORS, Explorer

        torch.set_num_threads(1)
        explorer = Explorer(networks)
        sample = next(iter(explorer.samples))
        for estimator in ESTIMATORS:
            explorer.answer("reconstruct", {"image": sample, "estimator": estimator})
        limit_memory(memory)
        pipe.send(("ready", None))
    except Exception as error:
        pipe.send(("error", str(error) if isinstance(error, MenetError) else traceback.format_exc()))
        return
    serve_pipe(pipe, explorer.answer)


def serve_pipe(pipe: Connection, answer: Callable[[str, dict[str, Any]], Any]) -> None:
    """Answer requests from a pipe until its other end is closed."""
    while True:
        try:
            action, request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            found = ("answer", answer(action, request))
        except MenetError as error:
            found = ("error", str(error))
        except MemoryError:
            found = ("memory", "this needs more memory than a request may take; please choose a smaller image")
        except Exception as error:
            short = isinstance(error, RuntimeError) and "allocate" in str(error)
            found = (
                ("memory", "this needs more memory than a request may take; please choose fewer draws")
                if short
                else ("fault", traceback.format_exc())
            )
        try:
            pipe.send(found)
        except OSError:
            return


def limit_memory(megabytes: int) -> None:
    """Let this process allocate no more than that beyond what it has, where the system can enforce it."""
    try:
        import resource

        with open("/proc/self/statm") as status:
            used = int(status.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
    except (ImportError, OSError, ValueError):
        return


def workers(networks: "Networks", limits: Limits) -> list[Worker]:
    """The two workers of a server, not yet started."""
    return [Worker(explore, (networks,), limits) for _ in range(1 + max(LANES.values()))]
