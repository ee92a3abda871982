"""MNIST's idx format, plain or gzipped, read without trusting its header.

A header is two zero bytes, a type (8: unsigned byte), the number of dimensions, and each dimension as a
big-endian 32-bit number. Its claim is compared with what the file can hold before anything is allocated.
"""

import math
import struct
from pathlib import Path

import numpy as np

from menet.data.archives import GZIP, Inflater
from menet.errors import DataError

UNSIGNED_BYTE = 8
# Sixteen times the 47 MB of MNIST's own training images: room for larger sets of the same kind.
MAX_BYTES = 768 << 20


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file, which must have this number of dimensions.

    Compression is detected from the first bytes, not from the name. At most 768 MiB.
    """
    raw = _raw(path)
    if raw[:2] == b"\x1f\x8b":
        stream = Inflater(memoryview(raw), path, GZIP)
        shape = _shape(bytes(stream.read(4 + 4 * dimensions)), dimensions, path)
        content: bytes | bytearray = stream.read(math.prod(shape))
        whole = stream.at_end()
    else:
        start = 4 + 4 * dimensions
        shape = _shape(raw[:start], dimensions, path)
        content, whole = raw[start:], len(raw) - start == math.prod(shape)
    if not whole:
        raise DataError(f"{path} is damaged: expected exactly the {math.prod(shape)} values its header claims")
    # A bytearray gives a writable array, which torch takes without a warning.
    writable = content if isinstance(content, bytearray) else bytearray(content)
    return np.frombuffer(writable, np.uint8).reshape(shape)


def _raw(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"expected at most {MAX_BYTES} bytes in {path}, got {size}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _shape(header: bytes, dimensions: int, path: Path) -> tuple[int, ...]:
    if len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path} is truncated: too short for an idx file of {dimensions} dimensions")
    if header[:4] != bytes([0, 0, UNSIGNED_BYTE, dimensions]):
        raise DataError(f"{path} is not an idx file of unsigned bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    if not all(shape) or math.prod(shape) > MAX_BYTES:
        claim = "×".join(map(str, shape))
        raise DataError(f"expected between 1 and {MAX_BYTES} values in {path}, its header claims {claim}")
    return shape
