"""A web server on this machine that can break off, tamper with and refuse what it serves."""

import contextlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Server:
    """What it serves and how; `requests` notes the path and range of each request it got."""

    files: dict[str, bytes]
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    wrong_place: bool = False
    tells_length: bool = True

    def __enter__(self) -> "Server":
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.requests.append((handler.path, asked))
        if handler.path not in self.files:
            handler.send_error(404)
            return
        content, start = self.files[handler.path], 0
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                handler.send_error(416)
                return
            handler.send_response(206)
            told = 0 if self.wrong_place else start
            handler.send_header("Content-Range", f"bytes {told}-{len(content) - 1}/{len(content)}")
        else:
            handler.send_response(200)
        body = content[start:]
        if self.tells_length:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        cut = self.break_after.pop(0) if self.break_after else len(body)
        # The other side hangs up when it has seen enough.
        with contextlib.suppress(ConnectionError):
            handler.wfile.write(body[:cut])
