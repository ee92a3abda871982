"""The server alone, with workers that compute nothing: limits, refusals, queues, and an end to all of it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from web_workers import light

from menet.web import MAX_JSON, Server, render
from menet.web.workers import MAX_UPLOAD, Limits, Worker

JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def running(limits: Limits, handler: Any = None) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), [Worker(light, (), limits) for _ in range(2)], handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(Limits(seconds=60, memory=512)) as one:
        yield one


def call(
    server: Server, path: str, body: bytes | dict[str, Any] = b"", method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    sent = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, content, {name: value for name, value in sent.items() if value})
    response = connection.getresponse()
    found = response.read()
    connection.close()
    is_json = response.getheader("Content-Type") == "application/json"
    return response.status, json.loads(found) if is_json else {"text": found.decode()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_page_is_served_with_a_policy_that_allows_nothing_outside(server: Server) -> None:
    status, found = call(server, "/", method="GET")
    assert status == 200
    assert "default-src 'none'" in found["text"]
    assert "connect-src 'self'" in found["text"]
    assert "http://" not in found["text"].replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in found["text"]


def test_answers_come_back(server: Server) -> None:
    assert call(server, "/api/reconstruct", {})[1]["action"] == "reconstruct"
    status, found = call(server, "/api/upload", b"x" * 1000, Content_Type="application/octet-stream")
    assert (status, found["bytes"]) == (200, 1000)


@pytest.mark.parametrize(
    ("status", "path", "body", "headers"),
    [
        (404, "/api/unknown", {}, {}),
        (404, "/reconstruct", {}, {}),
        (400, "/api/reconstruct", {}, {"Host": "["}),
        (400, "/api/reconstruct", {}, {"Origin": "http://["}),
        (400, "/api/reconstruct", b"not JSON", {}),
        (400, "/api/reconstruct", b"[" * 100_000, {}),
        (400, "/api/reconstruct", b"[1]", {}),
        (400, "/api/reconstruct", {"what": "invalid"}, {}),
        (413, "/api/reconstruct", b"x" * (MAX_JSON + 1), {}),
        (413, "/api/upload", b"x" * (MAX_UPLOAD + 1), {"Content_Type": "image/png"}),
        (415, "/api/reconstruct", {}, {"Content_Type": "text/plain"}),
        (415, "/api/upload", b"x", {"Content_Type": "multipart/form-data"}),
        (403, "/api/reconstruct", {}, {"Host": "rebound.example:8000"}),
        (403, "/api/reconstruct", {}, {"Origin": "http://elsewhere.example"}),
        (411, "/api/reconstruct", b"", {"Content_Length": "many"}),
    ],
)
def test_what_is_refused_gets_a_sentence(
    server: Server, status: int, path: str, body: Any, headers: dict[str, str]
) -> None:
    found = call(server, path, body, **headers)
    assert found[0] == status
    assert len(found[1]["error"]) > 10


def test_a_request_that_never_ends_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("menet.web.SECONDS_TO_SEND", 0.2)
    with socket.create_connection(server.server_address[:2], timeout=60) as connection:
        head = "POST /api/upload HTTP/1.0", "Host: localhost", "Content-Type: image/png", "Content-Length: 999"
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        for _ in range(2):
            connection.sendall(b"x")
            time.sleep(0.5)
        assert b" 408 " in connection.recv(1000)


def test_a_job_that_takes_too_long_costs_its_worker_alone() -> None:
    with running(Limits(seconds=3.0)) as server:
        for lane in server.lanes:
            lane.start()
        before = call(server, "/api/reconstruct", {})[1]["pid"]
        status, found = call(server, "/api/reconstruct", {"what": "sleep", "seconds": 600})
        assert status == 504
        assert "more than 3 seconds" in found["error"]
        assert not is_running(before)
        status, found = call(server, "/api/reconstruct", {})
        assert status == 200
        assert found["pid"] != before


def test_a_worker_that_dies_is_replaced(server: Server) -> None:
    assert call(server, "/api/reconstruct", {"what": "die"})[0] == 503
    assert call(server, "/api/reconstruct", {})[0] == 200


def test_a_fault_is_told_in_the_terminal(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = call(server, "/api/reconstruct", {"what": "fault"})
    assert status == 500
    assert "planted" not in found["error"]
    assert "planted" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux enforces the limit")
def test_memory_is_bounded(server: Server) -> None:
    status, found = call(server, "/api/reconstruct", {"what": "allocate", "bytes": 2 << 30})
    assert status == 503
    assert "memory" in found["error"]
    assert call(server, "/api/reconstruct", {"what": "allocate", "bytes": 1 << 20})[0] == 200


def test_a_slow_attack_does_not_keep_a_slider_waiting(server: Server) -> None:
    call(server, "/api/attack", {})
    attack = threading.Thread(target=call, args=(server, "/api/attack", {"what": "sleep", "seconds": 20}))
    attack.start()
    assert call(server, "/api/reconstruct", {})[0] == 200
    assert attack.is_alive()
    server.lanes[1]._stop()
    attack.join()


def test_a_full_queue_says_so() -> None:
    with running(Limits(seconds=60, waiting=1)) as server:
        server.lanes[0].start()
        first = threading.Thread(target=call, args=(server, "/api/reconstruct", {"what": "sleep", "seconds": 60}))
        first.start()
        while server.lanes[0]._places._value:
            time.sleep(0.01)
        status, found = call(server, "/api/reconstruct", {})
        assert status == 503
        assert "try again" in found["error"]
    first.join()


def test_closing_the_server_ends_its_workers() -> None:
    with running(Limits()) as server:
        server.lanes[0].start()
        pid = server.lanes[0].pid
        assert pid is not None
        assert is_running(pid)
    assert not is_running(pid)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for the process in /proc")
def test_workers_end_with_a_server_that_was_killed() -> None:
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from web_workers import light\nfrom menet.web.workers import Limits, Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(light, (), Limits()); worker.start(); print(worker.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_data_in_the_exported_page_cannot_end_its_element() -> None:
    page = render({"about": {"note": "</script><script>alert(1)</script><!--"}})
    assert page.count("<script") == 2
    assert "connect-src 'none'" in page
    data = page.partition('id="static">')[2].partition("</script>")[0]
    assert json.loads(data)["about"]["note"].startswith("</script>")
