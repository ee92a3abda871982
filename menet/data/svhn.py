"""SVHN, cropped digits: 73,257 + 26,032 house-number digits, 32×32, three channels, in MATLAB 5 `.mat` files.

Only what SVHN's files are made of is read: real, dense, numeric arrays at the top level, compressed or not.
All else in a file is skipped or refused. Headers are not trusted: a claimed size is compared with what the file
can hold before anything is allocated, and compressed arrays are inflated no further than their header says.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from menet.data.dataset import Dataset, require_file
from menet.data.published import ZLIB, Inflater
from menet.errors import DataError

CLASSES = tuple("0123456789")
MEAN, STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)

HEADER_BYTES = 128
COMPRESSED, MATRIX = 15, 14
INT32, UINT32, INT8 = 5, 6, 1
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)
COMPLEX = 0x0800
MAX_DIMENSIONS = 8
# SVHN's training images are 225 MB, its extra images 1.6 GB.
MAX_BYTES = 2 << 30


def file_name(split: str) -> str:
    """The file of a split."""
    return f"{split}_32x32.mat"


def read(folder: Path, split: str) -> Dataset:
    """Read one split into memory; the publisher's label 10 is the digit 0."""
    path = require_file(folder / file_name(split), "svhn")
    arrays = read_mat(path, ("X", "y"))
    pixels, labels = arrays["X"], arrays["y"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise DataError(f"expected X as uint8[32, 32, 3, n] in {path}, got {pixels.dtype}{list(pixels.shape)}")
    if labels.size != pixels.shape[3]:
        raise DataError(f"expected one label per image in {path}, got {labels.size} for {pixels.shape[3]}")
    digits = labels.ravel().astype(np.float64)
    if not np.isin(digits, np.arange(11)).all():
        raise DataError(f"expected labels from 1 to 10 in {path}")
    return Dataset(
        name="svhn",
        split=split,
        images=torch.from_numpy(pixels.transpose(3, 2, 0, 1).copy()),
        labels=torch.from_numpy(digits.astype(np.int64) % 10),
        classes=CLASSES,
        mean=MEAN,
        std=STD,
    )


@dataclass
class _Plain:
    """A part of the file, read in pieces like an `Inflater`."""

    view: memoryview
    path: Path

    def can_hold(self, count: int) -> bool:
        return count <= len(self.view)

    def read(self, count: int) -> memoryview:
        if not self.can_hold(count):
            raise DataError(f"{self.path} is truncated in the middle of an array")
        piece, self.view = self.view[:count], self.view[count:]
        return piece


def read_mat(path: Path, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of these names, in column-major order as MATLAB keeps them; an error if one is missing."""
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    order = {b"IM": "<", b"MI": ">"}.get(bytes(content[126:128]))
    if len(content) < HEADER_BYTES or order is None or bytes(content[124:126]) not in (b"\x00\x01", b"\x01\x00"):
        raise DataError(f"expected a MATLAB 5 file, got {path}")
    found: dict[str, np.ndarray] = {}
    at = HEADER_BYTES
    while at + 8 <= len(content):
        kind, size = struct.unpack(f"{order}II", content[at : at + 8])
        if size > len(content) - at - 8:
            raise DataError(f"{path} is damaged: an element claims {size} bytes, more than the file has left")
        body = content[at + 8 : at + 8 + size]
        at += 8 + size
        stream: _Plain | Inflater = _Plain(body, path)
        if kind == COMPRESSED:
            stream = Inflater(body, path, ZLIB)
            kind, size = struct.unpack(f"{order}II", stream.read(8))
        if kind == MATRIX:
            named = _matrix(stream, order, path, wanted)
            found.update([named] if named else [])
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(f"expected a numeric array {missing[0]!r} in {path}, got none")
    return found


def _matrix(
    stream: _Plain | Inflater, order: str, path: Path, wanted: tuple[str, ...]
) -> tuple[str, np.ndarray] | None:
    kind, flags = _small(stream, order, path, limit=8)
    if kind != UINT32 or len(flags) != 8:
        raise DataError(f"{path} is damaged: an array without flags")
    (flag_word,) = struct.unpack(f"{order}I", flags[:4])
    kind, packed = _small(stream, order, path, limit=4 * MAX_DIMENSIONS)
    if kind != INT32 or len(packed) % 4:
        raise DataError(f"{path} is damaged: an array without dimensions")
    shape = struct.unpack(f"{order}{len(packed) // 4}i", packed)
    kind, raw_name = _small(stream, order, path, limit=64)
    name = raw_name.decode("latin-1")
    if kind != INT8 or name not in wanted:
        return None
    if flag_word & 0xFF not in NUMERIC_CLASSES or flag_word & COMPLEX:
        raise DataError(f"expected {name!r} in {path} to hold real numbers")
    return name, _numbers(stream, order, path, shape)


def _numbers(stream: _Plain | Inflater, order: str, path: Path, shape: tuple[int, ...]) -> np.ndarray:
    kind, size, inline = _tag(stream, order, path)
    if kind not in STORED:
        raise DataError(f"{path} is damaged: unknown number format {kind}")
    dtype = np.dtype(f"{order}{STORED[kind]}")
    claimed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 1 or claimed != size or size > MAX_BYTES or not stream.can_hold(size):
        claim = "×".join(map(str, shape))
        raise DataError(f"{path} is damaged: it cannot hold the {claim} values in {size} bytes it claims")
    content = inline if inline is not None else stream.read(size)
    return np.frombuffer(content, dtype).reshape(shape, order="F")


def _small(stream: _Plain | Inflater, order: str, path: Path, limit: int) -> tuple[int, bytes]:
    kind, size, inline = _tag(stream, order, path)
    if size > limit:
        raise DataError(f"{path} is damaged: expected at most {limit} bytes, its header claims {size}")
    return kind, inline if inline is not None else bytes(stream.read(size + -size % 8))[:size]


def _tag(stream: _Plain | Inflater, order: str, path: Path) -> tuple[int, int, bytes | None]:
    first = bytes(stream.read(8))
    word, size = struct.unpack(f"{order}II", first)
    if word >> 16:
        # The short form: size and kind share a word, and up to four bytes of content follow at once.
        if word >> 16 > 4:
            raise DataError(f"{path} is damaged: a short element of {word >> 16} bytes")
        return word & 0xFFFF, word >> 16, first[4 : 4 + (word >> 16)]
    return word, size, None
