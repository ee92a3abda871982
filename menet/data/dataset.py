"""What every dataset looks like to the rest of the project."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

SPLITS = ("train", "test")

Index = slice | Int[Tensor, " b"]


class DataWarning(UserWarning):
    """Something about a dataset that a reader of its results should know."""


@cache
def notice_once(message: str) -> None:
    """Warn with a `DataWarning`, at most once per process for each message."""
    warnings.warn(message, DataWarning, stacklevel=4)


@runtime_checkable
class Images(Protocol):
    """Images that need not be in memory: a slice or a vector of positions gives them as a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> Tensor: ...


class Joined:
    """Rows of several equally wide `uint8` arrays, most often memory-mapped files, read as one run of images.

    Nothing is copied until images are asked for; then each row is one copy of contiguous bytes.
    """

    def __init__(self, parts: Sequence[np.ndarray], shape: tuple[int, int, int]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self._image_shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._image_shape)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Index) -> UInt8[Tensor, "b c h w"]:
        positions = positions_of(index, len(self)).numpy()
        owner = np.searchsorted(self._ends, positions, side="right")
        rows = np.empty((len(positions), int(np.prod(self._image_shape))), np.uint8)
        for number, part in enumerate(self._parts):
            chosen = np.flatnonzero(owner == number)
            rows[chosen] = part[positions[chosen] - (self._ends[number] - len(part))]
        return torch.from_numpy(rows).unflatten(1, self._image_shape)


@dataclass(frozen=True, eq=False)
class Dataset:
    """One split of a dataset: images as bytes, labels as positions in `classes`.

    `mean` and `std` are the recommended normalisation per channel on the [0,1] scale; they are applied inside
    a network, never here.
    """

    name: str
    split: str
    images: Tensor | Images
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(
        self, index: Index, augment: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"]]:
        """The images at `index` (a slice or a vector of positions) in [0,1], and their labels.

        `augment` works on the bytes, before they become four times as many.
        """
        images = self.images[index]
        if augment is not None:
            images = augment(images)
        return images.to(torch.float32).div_(255), self.labels[index]


def positions_of(index: Index, length: int) -> Int[Tensor, " b"]:
    """A slice or vector of possibly negative positions as a vector of positions in [0, length)."""
    if isinstance(index, slice):
        chosen = range(*index.indices(length))
        # Written so that a slice with its end before its start is empty, as in Python; for torch it is an error.
        return torch.arange(chosen.start, chosen.start + len(chosen) * chosen.step, chosen.step)
    outside = (index < -length) | (index >= length)
    if outside.any():
        raise IndexError(f"position {int(index[outside][0])} is outside a dataset of {length} images")
    return torch.where(index < 0, index + length, index)
