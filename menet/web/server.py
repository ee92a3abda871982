"""A small server for the page: one page, a few requests, and limits on all that a request may cost.

The process that talks to browsers computes nothing and imports no torch. Two workers, processes of their own,
compute: one answers sliders, the other runs attacks and certificates, so that a slow attack does not keep a
slider waiting. A job that takes too long, or a worker that dies, costs that worker, which is replaced; nothing
else is lost. Workers end when the pipe to the server closes, however the server ends.
"""

import base64
import hashlib
import json
import multiprocessing
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from menet.errors import MenetError

if TYPE_CHECKING:
    from menet.web.explorer import Networks

MAX_JSON = 512 << 10
"""Bytes of a request other than an upload; its largest part is an image of 96×96 pixels."""
MAX_UPLOAD = 8 << 20
MAX_DISCARDED = 32 << 20
"""Bytes of a refused body that are read and thrown away, so that the browser sees the refusal."""
MAX_CONNECTIONS = 64
SECONDS_TO_SEND = 20.0
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


def render(static: dict[str, Any] | None = None) -> str:
    """The page as one HTML file that loads nothing; with `static` answers, it asks nobody."""
    text = files("menet.web").joinpath("page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    asks = "'self'" if static is None else "'none'"
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; connect-src {asks}"
    )
    # In a script element only `</` and `<!--` could end the data.
    data = json.dumps(static, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return text.replace("{{policy}}", policy).replace("{{static}}", data)


class Server(ThreadingHTTPServer):
    """The page and its requests, on one address; `close` stops everything that was started."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], lanes: list[Worker], handler: type["Handler"] | None = None
    ) -> None:
        self.lanes = lanes
        self.page = render().encode()
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler or Handler)

    @property
    def url(self) -> str:
        """What to type into a browser."""
        host, port = self.server_address[:2]
        name = str(host)
        name = "localhost" if name in ("0.0.0.0", "::") else f"[{name}]" if ":" in name else name
        return f"http://{name}:{port}/"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return str(self.server_address[0]).startswith("127.") or self.server_address[0] == "::1"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            body = b'{"error": "many requests are waiting; please try again in a moment"}'
            head = f"HTTP/1.0 503 Service Unavailable\r\nContent-Length: {len(body)}\r\n\r\n"
            try:
                request.settimeout(1)
                request.sendall(head.encode() + body)
            except OSError:
                pass
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that goes away is no error of the server.
        if not isinstance(sys.exc_info()[1], (OSError, TimeoutError)):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop listening and stop the workers."""
        self.server_close()
        for lane in self.lanes:
            lane.close()


class Handler(BaseHTTPRequestHandler):
    """One request of a browser."""

    server: Server
    timeout = SECONDS_TO_SEND
    unread = 0
    """Bytes of the body that are still to come."""
    server_version, sys_version = "menet", ""

    def do_GET(self) -> None:
        """The page."""
        try:
            self._check_host()
            if urlsplit(self.path).path != "/":
                raise Refused(HTTPStatus.NOT_FOUND, "there is only one page here")
            self._reply(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        except Refused as refused:
            self._refuse(refused)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A request of the page: JSON, or the bytes of an uploaded image."""
        length = self.headers.get("Content-Length", "")
        self.unread = int(length) if length.isdecimal() and len(length) <= 12 else -1
        try:
            self._check_host()
            action = urlsplit(self.path).path.removeprefix("/api/")
            if action not in LANES or not self.path.startswith("/api/"):
                raise Refused(HTTPStatus.NOT_FOUND, f"unknown request {self.path[:60]!r}")
            body = self._body(MAX_UPLOAD if action == "upload" else MAX_JSON)
            request = {"data": body} if action == "upload" else self._parsed(body)
            began = time.perf_counter()
            answer = self.server.lanes[LANES[action]].ask(action, request)
            found = {**answer, "milliseconds": round(1000 * (time.perf_counter() - began), 1)}
            content = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
            self._reply(HTTPStatus.OK, content, "application/json")
        except Refused as refused:
            self._refuse(refused)

    def _check_host(self) -> None:
        """Refuse other sites that lead a visitor's browser here, by another name of this address or a form."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.loopback and host not in ("localhost", "127.0.0.1", "::1", self.server.server_address[0]):
            raise Refused(HTTPStatus.FORBIDDEN, "this page is for this machine alone; open it by its own address")
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other sites are not answered")

    def _body(self, most: int) -> bytes:
        if self.unread < 0:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected a request that says how long it is")
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        # What a form of another site can send without asking first.
        simple = kind in ("", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded")
        if self.unread > most:
            megabytes = f"{most / 2**20:g} MB"
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"this file is too large; please choose one of at most {megabytes}",
            )
        if simple:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected application/json, or an image")
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        deadline = time.monotonic() + SECONDS_TO_SEND
        while self.unread:
            try:
                piece = self.rfile.read1(min(self.unread, 1 << 16))
            except TimeoutError:
                piece = b""
            if not piece or time.monotonic() > deadline:
                raise Refused(HTTPStatus.REQUEST_TIMEOUT, "the request was incomplete; please try again")
            self.unread -= len(piece)
            yield piece

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "expected a request in JSON") from error
        if not isinstance(request, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "expected a JSON object")
        return request

    def _refuse(self, refused: Refused) -> None:
        # Closing a connection with unread bytes resets it, and the browser would not see why it was refused.
        if refused.status != HTTPStatus.REQUEST_TIMEOUT and 0 < self.unread <= MAX_DISCARDED:
            with suppress(Refused, OSError):
                for _ in self._pieces():
                    pass
        body = json.dumps({"error": refused.message}, ensure_ascii=False).encode()
        self._reply(refused.status, body, "application/json")

    def _reply(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Content-Security-Policy", "frame-ancestors 'self'"),
        ):
            self.send_header(name, value)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: a terminal full of lines hides the one that matters."""


def workers(networks: "Networks", limits: Limits) -> list[Worker]:
    """The two workers of a server, not yet started."""
    return [Worker(explore, (networks,), limits) for _ in range(1 + max(LANES.values()))]
