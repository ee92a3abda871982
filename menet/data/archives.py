"""Decompression that never produces more bytes than asked for: gzip and zlib streams, tar and zip archives."""

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from menet.errors import DataError

# Deflate cannot do better than 1032 to 1, so a claim beyond that is false without looking further.
MAX_DEFLATE_RATIO = 1032
ZLIB, GZIP = zlib.MAX_WBITS, zlib.MAX_WBITS | 16
CHUNK = 1 << 18
MAX_MEMBER_BYTES = 64 << 20


class Inflater:
    """A compressed stream read in pieces of known size, as `read(n)` of a file would."""

    def __init__(self, compressed: memoryview, path: Path, wrapper: int) -> None:
        self._input, self._path, self._wrapper = compressed, path, wrapper
        self._taken = 0
        self._decoder = zlib.decompressobj(wrapper)
        self._left = b""
        self.size = len(compressed)

    def can_hold(self, count: int) -> bool:
        """Whether the whole stream could expand to `count` bytes at all."""
        return count <= MAX_DEFLATE_RATIO * (self.size + 64)

    def read(self, count: int) -> bytearray:
        """Exactly `count` bytes, or a `DataError`; memory grows only with bytes that were really there."""
        if not self.can_hold(count):
            raise DataError(f"{self._path} is damaged: its header claims {count} bytes, more than it can hold")
        out = bytearray()
        while len(out) < count:
            piece = self.some(count - len(out))
            if not piece:
                raise DataError(f"{self._path} is truncated: expected {count} bytes, got {len(out)}")
            out += piece
        return out

    def at_end(self) -> bool:
        """Whether nothing is left, in the stream or after it; reaching the end verifies its checksum."""
        if self.some(1) or not self._decoder.eof:
            return False
        return self._taken == self.size and not self._decoder.unused_data

    def some(self, limit: int) -> bytes:
        """At most `limit` further bytes; none at the end."""
        try:
            while not self._decoder.eof:
                if not self._left:
                    self._left = bytes(self._input[self._taken : self._taken + CHUNK])
                    self._taken += len(self._left)
                if not self._left:
                    return b""
                piece = self._decoder.decompress(self._left, min(limit, CHUNK))
                self._left = self._decoder.unconsumed_tail
                if piece:
                    return piece
        except zlib.error as error:
            raise DataError(f"{self._path} is damaged: {error}") from error
        return b""


def gzip_pieces(path: Path, limit: int) -> Iterator[bytes]:
    """The content of a gzip file in pieces; a `DataError` beyond `limit` bytes."""
    inflater = Inflater(memoryview(path.read_bytes()), path, GZIP)
    total = 0
    while piece := inflater.some(CHUNK):
        total += len(piece)
        if total > limit:
            raise DataError(f"expected at most {limit} bytes in {path}, got more")
        yield piece
    if not inflater.at_end():
        raise DataError(f"{path} is damaged: not one complete gzip stream")


def unpack(path: Path, to: Path, wanted: Collection[str]) -> None:
    """Extract the regular files below the top-level folders `wanted` of a zip or tar archive into `to`.

    Links, files above 64 MiB and names that lead out of `to` are left out.
    """
    try:
        for name, stream in _members(path):
            parts = PurePosixPath(name).parts
            if parts and parts[0] in wanted and ".." not in parts:
                target = to.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with stream, target.open("wb") as out:
                    shutil.copyfileobj(stream, out)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise DataError(f"cannot unpack {path}: {error}") from error


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and entry.file_size <= MAX_MEMBER_BYTES:
                    yield entry.filename, archive.open(entry)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream and member.size <= MAX_MEMBER_BYTES:
                yield member.name, stream
