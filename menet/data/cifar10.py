"""CIFAR-10: 50,000 + 10,000 photographs, 32×32, three channels, in its binary or its python version."""

from pathlib import Path

import numpy as np
import torch

from menet.data.dataset import Dataset, Joined, require_file
from menet.data.plain_pickle import read_plain_pickle
from menet.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"


def names(split: str) -> tuple[str, ...]:
    """The batch files of a split, without the ending that the binary version gives them."""
    return ("test_batch",) if split == "test" else tuple(f"data_batch_{number}" for number in range(1, 6))


def read(folder: Path, split: str) -> Dataset:
    """Read one split: memory-mapped from the binary version, or from the python one if only that is there."""
    if not (folder / BINARY).exists() and (folder / PYTHON).exists():
        batches = [_python_batch(require_file(folder / PYTHON / name, "cifar10")) for name in names(split)]
    else:
        paths = [folder / BINARY / f"{name}.bin" for name in names(split)]
        batches = [_binary_batch(require_file(path, "cifar10")) for path in paths]
    images, labels = zip(*batches, strict=True)
    return Dataset(
        name="cifar10",
        split=split,
        images=Joined(images, SHAPE),
        labels=torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        classes=CLASSES,
        mean=MEAN,
        std=STD,
    )


def _binary_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        # Copy-on-write, because torch warns about read-only arrays; the file is never changed.
        content = np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(content) % (1 + PIXELS):
        raise DataError(f"expected a multiple of {1 + PIXELS} bytes in {path}, got {len(content)}")
    rows = content.reshape(-1, 1 + PIXELS)
    return rows[:, 1:], _labels(rows[:, 0], path)


def _python_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    batch = read_plain_pickle(path)
    pixels = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list | np.ndarray):
        raise DataError(f"expected an array `data` and a list `labels` in {path}")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
        raise DataError(f"expected pixels uint8[n, {PIXELS}] in {path}, got {pixels.dtype}{list(pixels.shape)}")
    if isinstance(labels, list) and not all(type(label) is int for label in labels):
        raise DataError(f"expected integer labels in {path}")
    if len(labels) != len(pixels):
        raise DataError(f"expected one label per image in {path}, got {len(labels)} for {len(pixels)}")
    try:
        numbers = np.asarray(labels, np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise DataError(f"expected integer labels in {path}: {error}") from error
    return np.ascontiguousarray(pixels), _labels(numbers, path)


def _labels(labels: np.ndarray, path: Path) -> np.ndarray:
    if labels.ndim != 1 or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(f"expected labels from 0 to 9 in {path}")
    return np.array(labels)
