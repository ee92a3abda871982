"""SVHN, cropped digits: 73,257 + 26,032 house-number digits, 32×32, three channels, in `.mat` files."""

from pathlib import Path

import numpy as np
import torch

from menet.data.dataset import Dataset, require_file
from menet.data.mat import read_mat
from menet.errors import DataError

CLASSES = tuple("0123456789")
MEAN, STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)


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
