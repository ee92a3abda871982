"""`load`: a dataset by its name."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from menet.data import catalog, folder
from menet.data.checksums import Checksums
from menet.data.dataset import SPLITS, Dataset, notice_once
from menet.data.image_files import ImageFiles, packed
from menet.data.places import data_folder
from menet.errors import ConfigurationError


def load(
    name: str,
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    *,
    side: int | None = None,
) -> Dataset:
    """Load one split of `digits`, `mnist`, `cifar10`, `svhn`, `tiny-imagenet` or `folder`.

    `root` holds one folder per dataset; it is `MENET_DATA`, else in the user's cache folder. For `folder` it
    is the folder of images itself, which can also be written `folder:PATH`; only there may `side` ask for
    another size. Content that is not exactly its publisher's is allowed, and said once (`DataWarning`).
    """
    if split not in SPLITS:
        raise ConfigurationError(f"split is {split!r}; it must be one of {', '.join(SPLITS)}")
    name, _, path = name.partition(":")
    source = catalog.source(name)
    if name != "folder" and (path or side is not None):
        raise ConfigurationError(f"{name} takes neither a path nor `side`; only `folder` does")
    at = place_of(name, path or root)
    read = partial(folder.read, side=side) if name == "folder" else source.read
    dataset = read(at, split)
    if isinstance(dataset.images, ImageFiles):
        dataset = replace(dataset, images=packed(dataset.images, f"{name}-{split}", at))
    _mention_difference(source, at, split)
    return dataset


def place_of(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of one dataset."""
    return Path(root).expanduser() if name == "folder" and root else data_folder(root) / name


def _mention_difference(source: catalog.Source, at: Path, split: str) -> None:
    checksums = Checksums(at)
    files = [file for file in source.version(at) if file.split in (None, split)]
    different = [file.path for file in files if not checksums.is_exact(file)]
    if different:
        notice_once(
            f"{source.name} in {at} is not exactly what its publisher offers ({different[0]} differs), "
            f"so results on it are its own; `menet data verify {source.name}` tells more"
        )
