"""MNIST: 60,000 + 10,000 handwritten digits, 28×28, one channel, in idx files."""

from pathlib import Path

import torch

from menet.data.dataset import Dataset, require_file
from menet.data.idx import read_idx
from menet.errors import DataError

CLASSES = tuple("0123456789")
MEAN, STD = (0.1307,), (0.3081,)
SIDE = 28
PREFIX = {"train": "train", "test": "t10k"}


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
