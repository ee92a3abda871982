"""CIFAR-10: 50,000 + 10,000 photographs, 32×32, three channels, in its binary or its python version."""

from pathlib import Path

import numpy as np
import torch

from menet.data.dataset import Dataset, Joined
from menet.data.places import require
from menet.data.unpickle import read_plain_pickle
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
        batches = [_python_batch(require(folder / PYTHON / name, "cifar10")) for name in names(split)]
    else:
        paths = [folder / BINARY / f"{name}.bin" for name in names(split)]
        batches = [_binary_batch(require(path, "cifar10")) for path in paths]
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
        # Copy-on-write, because torch warns of arrays that nobody may write to; the file is never changed.
        content = np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(content) % (1 + PIXELS):
        raise DataError(f"{path} has {len(content)} bytes, not a multiple of the {1 + PIXELS} of one image")
    rows = content.reshape(-1, 1 + PIXELS)
    return rows[:, 1:], _labels(rows[:, 0], path)


def _python_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    batch = read_plain_pickle(path)
    pixels = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list | np.ndarray):
        raise DataError(f"{path} holds no array `data` with a list `labels`")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
        raise DataError(f"{path} holds pixels {pixels.dtype}{list(pixels.shape)}, not uint8[n, {PIXELS}]")
    if isinstance(labels, list) and not all(type(label) is int for label in labels):
        raise DataError(f"{path} holds labels that are not whole numbers")
    if len(labels) != len(pixels):
        raise DataError(f"{path} holds {len(pixels)} images and {len(labels)} labels")
    try:
        numbers = np.asarray(labels, np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise DataError(f"{path} holds labels that are not whole numbers: {error}") from error
    return np.ascontiguousarray(pixels), _labels(numbers, path)


def _labels(labels: np.ndarray, path: Path) -> np.ndarray:
    if labels.ndim != 1 or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(f"{path} holds a label outside 0 to 9")
    return np.array(labels)
