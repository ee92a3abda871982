"""Decompression that never makes more bytes than were asked for."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from menet.errors import DataError

# Deflate cannot do better than 1032 to 1, so a claim beyond that is false without looking further.
DEFLATE_MAXIMUM_RATIO = 1032
ZLIB, GZIP = zlib.MAX_WBITS, zlib.MAX_WBITS | 16
CHUNK = 1 << 18


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
        return count <= DEFLATE_MAXIMUM_RATIO * (self.size + 64)

    def read(self, count: int) -> bytearray:
        """Exactly `count` bytes, or a `DataError`; memory grows only with bytes that were really there."""
        if not self.can_hold(count):
            raise DataError(f"{self._path} claims {count} bytes of content, more than it can hold")
        out = bytearray()
        while len(out) < count:
            piece = self.some(count - len(out))
            if not piece:
                raise DataError(f"{self._path} ends after {len(out)} of {count} bytes")
            out += piece
        return out

    def at_end(self) -> bool:
        """Whether nothing is left, inside or behind; getting there makes the decoder check its checksum."""
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
            raise DataError(f"{path} expands to more than {limit} bytes")
        yield piece
    if not inflater.at_end():
        raise DataError(f"{path} is not one whole gzip stream")
