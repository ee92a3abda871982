"""Downloads from a server that misbehaves: broken off, tampered with, without ranges, absent."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_server import Server

from menet.data import install
from menet.data.install import download
from menet.errors import DataError

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "file.bin"


def get(server: Server, target: Path, *names: str) -> Path:
    addresses = [f"{server.address}{name}" for name in names or ("/file.bin",)]
    return download(addresses, target, MD5, len(CONTENT))


def test_whole_at_once(target: Path) -> None:
    with Server({"/file.bin": CONTENT}) as server:
        assert get(server, target).read_bytes() == CONTENT
    assert os.listdir(target.parent) == ["file.bin"]


def test_broken_off_is_continued_where_it_stopped(target: Path) -> None:
    with Server({"/file.bin": CONTENT}, break_after=[300_000, 300_000]) as server:
        assert get(server, target).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=300000-", "bytes=600000-"]


def test_a_later_call_continues(target: Path) -> None:
    with Server({"/file.bin": CONTENT}, break_after=[100_000, 10, 10, 10, 10]) as server:
        with pytest.raises(DataError, match=r"interrupted after 100020 of 1024000 bytes"):
            get(server, target)
        assert not target.exists()
        server.break_after.clear()
        assert get(server, target).read_bytes() == CONTENT
    assert server.requests[-1][1] == "bytes=100020-"


def test_a_server_without_ranges_starts_again(target: Path) -> None:
    with Server({"/file.bin": CONTENT}, ranges=False, break_after=[300_000]) as server:
        assert get(server, target).read_bytes() == CONTENT
    assert len(server.requests) == 2


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"x", b"x" + CONTENT[1:], b"<html>no</html>", CONTENT + b"x"])
def test_tampered_content_never_gets_its_name(target: Path, served: bytes) -> None:
    with (
        Server({"/file.bin": served}) as server,
        pytest.raises(DataError, match=r"checksum|expected 1024000 bytes"),
    ):
        get(server, target)
    assert not target.exists()
    assert not list(target.parent.iterdir()), "what has the wrong checksum is thrown away"
    with Server({"/file.bin": CONTENT}) as server:
        get(server, target)
    assert target.read_bytes() == CONTENT


def test_a_longer_file_is_not_received_to_its_end(target: Path) -> None:
    longer = Server({"/file.bin": CONTENT + bytes(50_000_000)}, tells_length=False)
    with longer as server, pytest.raises(DataError, match="expected 1024000 bytes, the server sends more"):
        get(server, target)


def test_the_next_address_is_tried(target: Path) -> None:
    with Server({"/tampered": CONTENT[::-1], "/file.bin": CONTENT}) as server:
        assert get(server, target, "/missing", "/tampered", "/file.bin").read_bytes() == CONTENT


def test_a_server_that_continues_at_the_wrong_place_is_refused(target: Path) -> None:
    astray = Server({"/file.bin": CONTENT}, break_after=[1000], wrong_place=True)
    with astray as server, pytest.raises(DataError, match="wrong offset"):
        get(server, target)


def test_what_was_left_by_another_file_is_thrown_away(target: Path) -> None:
    with Server({"/file.bin": CONTENT}, break_after=[1000] * 3) as server, pytest.raises(DataError):
        get(server, target)
    (left,) = target.parent.glob(".*.partial")
    left.write_bytes(b"x" * 5000)
    with Server({"/file.bin": CONTENT}) as server:
        assert get(server, target).read_bytes() == CONTENT


def test_no_network_is_one_line(target: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/file.bin"
        with pytest.raises(
            DataError, match=r"file\.bin could not be downloaded \(127\.0\.0\.1: .*refused"
        ) as caught:
            download([address], target, MD5, len(CONTENT))
    assert "\n" not in str(caught.value)


def test_a_silent_server_is_given_up(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        with pytest.raises(DataError, match="timed out"):
            download([address], target, MD5, len(CONTENT))


def test_killed_midway_then_resumed(target: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from menet.data.install import download;"
        "download([sys.argv[1]], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))"
    )
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        address = f"http://127.0.0.1:{stuck.getsockname()[1]}/file.bin"
        child = subprocess.Popen([sys.executable, "-c", script, address, str(target), MD5, str(len(CONTENT))])
        try:
            connection, _ = stuck.accept()
            connection.recv(10_000)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode()
            connection.sendall(head + CONTENT[:700_000])
            for _ in range(500):
                partial = list(target.parent.glob(".*.partial"))
                if partial and partial[0].stat().st_size >= 400_000:
                    break
                time.sleep(0.02)
            child.send_signal(signal.SIGKILL)
        finally:
            child.kill()
            child.wait()
            connection.close()
    assert not target.exists()
    with Server({"/file.bin": CONTENT}) as server:
        assert get(server, target).read_bytes() == CONTENT
    (_, asked) = server.requests[0]
    assert asked
    assert int(asked.removeprefix("bytes=").removesuffix("-")) >= 400_000
    assert os.listdir(target.parent) == ["file.bin"]
