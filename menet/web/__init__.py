"""The page, and a small server for it: one page and a few requests.

The process that talks to browsers computes nothing and imports no torch; workers compute (`menet.web.workers`).
"""

import base64
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import SplitResult, urlsplit

from menet.web.workers import LANES, MAX_UPLOAD, Refused, Worker

MAX_JSON = 512 << 10
"""Bytes of a request other than an upload; its largest part is an image of 96×96 pixels."""
MAX_DISCARDED = 32 << 20
"""Bytes of a refused body that are read and thrown away, so that the browser sees the refusal."""
MAX_CONNECTIONS = 64
SECONDS_TO_SEND = 20.0


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


def _split(address: str) -> SplitResult:
    """The parts of an address; one such as `http://[` has none."""
    try:
        return urlsplit(address)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, "expected a valid address") from error


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
            if _split(self.path).path != "/":
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
            action = _split(self.path).path.removeprefix("/api/")
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
        host = _split(f"//{self.headers.get('Host', '')}").hostname
        if self.server.loopback and host not in ("localhost", "127.0.0.1", "::1", self.server.server_address[0]):
            raise Refused(HTTPStatus.FORBIDDEN, "this page is for this machine alone; open it by its own address")
        origin = self.headers.get("Origin")
        if origin is not None and _split(origin).netloc != self.headers.get("Host"):
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
