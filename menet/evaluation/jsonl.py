"""JSON Lines with a checksum per line, appended so that a killed writer leaves at most one torn line."""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from menet.errors import RecordError
from menet.files import lock

TORN = "is torn: it has no end"

_TAIL = len(',"crc":"00000000"}')


class Line(NamedTuple):
    """One line of a file: its content, or what is wrong with it."""

    number: int
    content: dict[str, Any]
    fault: str | None = None


def encode(content: Mapping[str, Any]) -> bytes:
    """`content`, of at least one field, as one line that ends in the CRC-32 of the rest of it.

    The checksum covers the text before `,"crc":` closed by `}`, so that a line stays plain JSON for any reader.
    """
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"a record cannot be written as JSON: {error}") from error
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def decode(number: int, raw: bytes) -> Line:
    """The line `raw`, without its line end."""
    body = raw[:-_TAIL] + b"}"
    if raw[-_TAIL:] != f',"crc":"{zlib.crc32(body):08x}"}}'.encode():
        return Line(number, {}, "is damaged or was edited: its checksum does not match")
    try:
        content = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        return Line(number, {}, "is not JSON")
    if not isinstance(content, dict):
        return Line(number, {}, "is not a JSON object")
    return Line(number, content)


def refuse(constant: str) -> None:
    """For `json.loads`, which would otherwise read NaN and Infinity: `encode` never writes them."""
    raise ValueError(f"expected JSON, got {constant}")


def read(path: Path) -> Iterator[Line]:
    """Every line of a file, intact or not, in order."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        for number, raw in enumerate(file, 1):
            if raw.endswith(b"\n"):
                yield decode(number, raw[:-1])
            else:
                yield Line(number, {}, TORN)


def has_line(path: Path) -> bool:
    """Whether the first line of a file is whole."""
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


class Appender:
    """A file of such lines, locked for appending by one process at a time.

    Opening it cuts off a torn last line, which only a writer that was killed can have left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if not lock(self._handle):
                raise RecordError(f"{path} is locked by another evaluation; wait until it ends, or stop it")
            self._cut_torn_end()
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, contents: Iterable[Mapping[str, Any]]) -> None:
        """Add lines in one write, on disk when this returns."""
        whole = b"".join(map(encode, contents))
        try:
            written = os.write(self._handle, whole)
            os.fsync(self._handle)
        except OSError as error:
            # The system does not know the name of an open file; whoever has to free space should.
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if written != len(whole):
            raise RecordError(f"{self.path} could not be written completely: is the disk full?")

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut_torn_end(self) -> None:
        size = end = os.fstat(self._handle).st_size
        while end:
            start = max(0, end - 65536)
            found = os.pread(self._handle, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._handle, end)
            os.fsync(self._handle)
