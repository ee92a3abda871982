"""What every dataset looks like to the rest of the project, and where datasets are kept."""

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pooch
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from menet.errors import DataError

SPLITS = ("train", "test")

Index = slice | Int[Tensor, " b"]


class DataWarning(UserWarning):
    """Something about a dataset that a reader of its results should know."""


@cache
def warn_once(message: str) -> None:
    """Warn with a `DataWarning`, at most once per process for each message."""
    warnings.warn(message, DataWarning, stacklevel=4)


@runtime_checkable
class Images(Protocol):
    """Images that need not be in memory: indexing by a slice or a vector of positions returns a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> Tensor: ...


class Joined:
    """Rows of several `uint8` arrays, usually memory-mapped files, as one sequence of images.

    Nothing is copied until images are indexed.
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


@dataclass(frozen=True)
class Selected:
    """The images at some positions, read when they are indexed."""

    images: Images
    positions: Int[Tensor, " n"]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Index) -> Tensor:
        return self.images[self.positions[positions_of(index, len(self))]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One split of a dataset: images as bytes, labels as positions in `classes`.

    `mean` and `std` are the recommended normalization per channel on the [0,1] scale; they are applied inside
    a network, never here. The order of the examples is fixed and mixes the classes, so that a prefix is a fair
    sample: where the publisher's files are sorted by class, the dataset applies a permutation that depends on
    nothing but the files' names (`order_of`).
    """

    name: str
    split: str
    images: Tensor | Images
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    total: int | None = None
    """Images of both splits, where the project split them and not the publisher."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(
        self, index: Index, augment: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"]]:
        """The images at `index` (a slice or a vector of positions) in [0,1], and their labels.

        `augment` is applied to the bytes, a quarter of the size of the floats.
        """
        images = self.images[index]
        if augment is not None:
            images = augment(images)
        return images.to(torch.float32).div_(255), self.labels[index]

    def sample(self, count: int | None) -> "Dataset":
        """A stratified sample of `count` examples, always the same ones; the dataset itself if it has no more."""
        if count is None or count >= len(self):
            return self
        return self.at(stratified(self.labels, count))

    def at(self, positions: Int[Tensor, " n"]) -> "Dataset":
        """The examples at these positions, in their order."""
        return replace(self, images=Selected(self.images, positions), labels=self.labels[positions])


def positions_of(index: Index, length: int) -> Int[Tensor, " b"]:
    """A slice or vector of possibly negative positions as a vector of positions in [0, length)."""
    if isinstance(index, slice):
        chosen = range(*index.indices(length))
        # A slice with its end before its start is empty, as in Python; torch would raise.
        return torch.arange(chosen.start, chosen.start + len(chosen) * chosen.step, chosen.step)
    index = torch.as_tensor(index)
    outside = (index < -length) | (index >= length)
    if outside.any():
        raise IndexError(f"expected a position in a dataset of {length} images, got {int(index[outside][0])}")
    return torch.where(index < 0, index + length, index)


def stratified(labels: Int[Tensor, " n"], count: int) -> Int[Tensor, " count"]:
    """Positions of `count` examples, in order, with every class as frequent as in `labels` (to within one).

    They follow from the labels alone, so that everything that asks for as many gets the same ones.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    grouped = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    within = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[grouped]]
    # The first half of every class comes before the second half of any.
    fraction = (within + 0.5) / sizes[labels[grouped]]
    return grouped[fraction.argsort(stable=True)[:count]].sort().values


def warn_of_missing_classes(dataset: Any, start: int, stop: int, what: str = "") -> None:
    """Warn if examples `start` to `stop` are of some of the classes only: accuracies on them say less."""
    what = what or f"examples {start} to {stop - 1}"
    there = set(dataset.labels[start:stop].tolist())
    missing = [name for label, name in enumerate(dataset.classes) if label not in there]
    if missing:
        named = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        warnings.warn(
            f"{what} of {dataset.name} hold {len(there)} of its {len(dataset.classes)} classes (none of {named})"
            "; take more of them for an accuracy over all classes",
            DataWarning,
            stacklevel=3,
        )


def order_of(name: str) -> bytes:
    """A key to sort examples by, so that classes mix: a hash of the example's name.

    The order depends neither on a seed nor on the file system, and adding files keeps the order of the others.
    """
    return hashlib.sha256(b"order of " + encoded(name)).digest()


def encoded(name: str) -> bytes:
    """The bytes of a file's name, which on Linux need not be valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def data_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds one folder per dataset: `root`, else `MENET_DATA`, else in the user's cache."""
    chosen = root or os.environ.get("MENET_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder() / "data"


def cache_folder() -> Path:
    """The user's cache folder for this project; all of it but `data` can be computed again."""
    return Path(pooch.os_cache("menet"))


def require_file(path: Path, name: str) -> Path:
    """`path`, if there is a regular file or a folder; otherwise an error that says how to get the dataset."""
    if not path.exists():
        raise DataError(
            f"{name} is not installed ({path} is missing); download it with `menet data fetch {name}`, "
            f"or use files you have with `menet data import {name} PATH`"
        )
    if not (path.is_file() or path.is_dir()):
        # Opening a pipe would wait forever, and a device may never end.
        raise DataError(f"cannot read {path}: not a regular file")
    return path
