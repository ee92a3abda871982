"""Datasets behind one interface (`Dataset`), read from their publishers' own formats.

Here the datasets by name: how to load them, who published them, where, and with which checksums. A new dataset is
one module with `read(folder, split)` and one entry in `SOURCES`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from menet.data import cifar10, folder, mnist, svhn, tiny_imagenet
from menet.data.dataset import SPLITS, Dataset, DataWarning, Images, data_folder, warn_once
from menet.data.folder import ImageFiles, UnreadableImage, packed
from menet.data.published import Checksums, Published
from menet.errors import ConfigurationError, DataError

__all__ = ["NAMES", "SPLITS", "DataWarning", "Dataset", "Images", "load"]


@dataclass(frozen=True)
class Archive:
    """One file to download: its addresses, tried in this order, and how to verify it."""

    name: str
    addresses: tuple[str, ...]
    md5: str
    size: int


@dataclass(frozen=True)
class Source:
    """A dataset as published; `images` and `classes` are the published counts, not those of the local files.

    Each of `versions` is a complete set of files (CIFAR-10 has a binary and a python version).
    """

    name: str
    read: Callable[[Path, str], Dataset]
    images: tuple[int, int] | None
    classes: int | None
    license: str
    archives: tuple[Archive, ...] = ()
    versions: tuple[tuple[Published, ...], ...] = ()
    embedded: bool = False

    def version(self, at: Path) -> tuple[Published, ...]:
        """The files of the version found in a folder; those of the first version where there is none."""
        present = (files for files in self.versions if any((at / file.path).exists() for file in files))
        return next(present, self.versions[0] if self.versions else ())


def _each_batch(place: str, ending: str, digests: str) -> tuple[Published, ...]:
    named = [(name, split) for split in SPLITS for name in cifar10.names(split)]
    return tuple(
        Published(f"{place}/{name}{ending}", md5, split)
        for (name, split), md5 in zip(named, digests.split(), strict=True)
    )


SKIP = ",skip-unreadable"
"""At the end of the name of a folder: leave out files that cannot be decoded."""
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
# Name, MD5 and size of the file as published, MD5 of its uncompressed content.
MNIST_FILES = (
    (
        "train-images-idx3-ubyte",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        9912422,
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    (
        "train-labels-idx1-ubyte",
        "d53e105ee54ea40749a09fcbcd1e9432",
        28881,
        "a25bea736e30d166cdddb491f175f624",
    ),
    (
        "t10k-images-idx3-ubyte",
        "9fb629c4189551a2d022fa330f9573f3",
        1648877,
        "2646ac647ad5339dbf082846283269ea",
    ),
    ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4542, "27ae3e4e09519cfbb04c329615203637"),
)
CIFAR10_BINARY = """
    5dd7e06a14cb22eb9f671a540d1b7c25 5ea93a67294ea407fff1d09f752e9692 942cd6a4bcdd0dd3c604fbe906cb4421
    ae636b3ba5c66a11e91e8cb52e771fcb 53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d"""
CIFAR10_PYTHON = """
    c99cafc152244af753f735de768cd75f d4bba439e000b95fd0a9bffe97cbabec 54ebc095f3ab1f0389bbae665268c751
    634d18415352ddfa80567beed471001a 482c414d41f54cd18b22e5b47cb7c3cb 40351d587109b95175f43aff81a1287e"""
SVHN_FILES = (
    ("train", "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
    ("test", "eb5a983be6a315427106f1b164d9cef3", 64_275_384),
)
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"

SOURCES = {
    source.name: source
    for source in (
        Source(
            name="digits",
            read=lambda at, split: mnist.read_digits(split),
            images=(4_000, 1_000),
            classes=10,
            license="as MNIST",
            embedded=True,
        ),
        Source(
            name="mnist",
            read=mnist.read,
            images=(60_000, 10_000),
            classes=10,
            license="CC BY-SA 3.0",
            archives=tuple(
                Archive(f"{name}.gz", tuple(f"{mirror}{name}.gz" for mirror in MNIST_MIRRORS), md5, size)
                for name, md5, size, _ in MNIST_FILES
            ),
            versions=(
                tuple(
                    Published(f"{name}.gz", content, "train" if name.startswith("train") else "test")
                    for name, _, _, content in MNIST_FILES
                ),
            ),
        ),
        Source(
            name="cifar10",
            read=cifar10.read,
            images=(50_000, 10_000),
            classes=10,
            license="none stated",
            archives=(
                Archive(
                    "cifar-10-binary.tar.gz",
                    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                    "c32a1d4ab5d03f1284b67883e8d87530",
                    170_052_171,
                ),
            ),
            versions=(
                _each_batch(cifar10.BINARY, ".bin", CIFAR10_BINARY),
                _each_batch(cifar10.PYTHON, "", CIFAR10_PYTHON),
            ),
        ),
        Source(
            name="svhn",
            read=svhn.read,
            images=(73_257, 26_032),
            classes=10,
            license="non-commercial only",
            archives=tuple(
                Archive(
                    svhn.file_name(split),
                    (f"http://ufldl.stanford.edu/housenumbers/{svhn.file_name(split)}",),
                    md5,
                    size,
                )
                for split, md5, size in SVHN_FILES
            ),
            versions=(tuple(Published(svhn.file_name(split), md5, split) for split, md5, _ in SVHN_FILES),),
        ),
        Source(
            name="tiny-imagenet",
            read=tiny_imagenet.read,
            images=(100_000, 10_000),
            classes=200,
            license="ImageNet's terms",
            archives=(
                Archive(
                    "tiny-imagenet-200.zip",
                    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                    TINY_IMAGENET_MD5,
                    248_100_043,
                ),
            ),
            versions=((Published(tiny_imagenet.FOLDER, TINY_IMAGENET_MD5, is_folder=True),),),
        ),
        Source(name="folder", read=folder.read, images=None, classes=None, license="yours"),
    )
}
NAMES = tuple(SOURCES)


def load(
    name: str,
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    *,
    side: int | None = None,
    skip_unreadable: bool = False,
) -> Dataset:
    """Load one split of `digits`, `mnist`, `cifar10`, `svhn`, `tiny-imagenet` or `folder:PATH`.

    `root` holds one folder per dataset; the default is `MENET_DATA`, else the user's cache folder. A folder of
    images may have any size with `side`, or written `folder:PATH@64`: images are scaled and center-cropped to
    64×64. With `skip_unreadable`, or written `folder:PATH@64,skip-unreadable`, damaged files are left out. That,
    and content that differs from what was published, is told in a `DataWarning`.
    """
    if split not in SPLITS:
        raise ConfigurationError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    name, path, side, skip = _parse(name, side, skip_unreadable)
    chosen = source(name)
    at = place_of(name, path or root)
    read = partial(folder.read, side=side, skip_unreadable=skip) if name == "folder" else chosen.read
    try:
        dataset = read(at, split)
        if isinstance(dataset.images, ImageFiles):
            dataset = replace(dataset, images=packed(dataset.images, f"{name}-{split}", at))
    except UnreadableImage as error:
        if name != "folder":
            raise
        written = f"folder:{at}{f'@{side}' if side else ''}{SKIP}"
        raise UnreadableImage(f"{error}; or leave out such files with {written}") from error
    _warn_of_differences(chosen, at, split)
    return dataset


def absolute(text: str, side: int | None = None, skip_unreadable: bool = False) -> str:
    """The name of a dataset with its options, such that it means the same in another working directory."""
    name, path, side, skip = _parse(text, side, skip_unreadable)
    if name != "folder" or not path:
        return text
    return f"folder:{Path(path).expanduser().absolute()}{f'@{side}' if side else ''}{SKIP if skip else ''}"


def source(name: str) -> Source:
    """The entry of a dataset by name."""
    if name not in SOURCES:
        hint = f"; for a folder of images write folder:{name}" if name and Path(name).is_dir() else ""
        raise ConfigurationError(f"unknown dataset {name!r}; choose from {', '.join(NAMES)}{hint}")
    return SOURCES[name]


def counted(name: str, root: str | os.PathLike[str] | None = None) -> tuple[int, int] | None:
    """How many training and test images of a dataset are at hand; None where it is not installed or damaged."""
    chosen, at = source(name), place_of(name, root)
    try:
        return len(chosen.read(at, "train")), len(chosen.read(at, "test"))
    except DataError:
        return None


def part_of(described: Mapping[str, Any]) -> str:
    """What a test set, as records describe it, has of the published one; empty if all, or if nothing is known."""
    known = SOURCES.get(described["name"])
    if known is None or known.images is None or described.get("split") != "test":
        return ""
    counts = (("examples", known.images[1], "test images"), ("classes", known.classes or 0, "classes"))
    return ", ".join(
        f"{described[key]:,} of its {published:,} {what}"
        for key, published, what in counts
        if described.get(key, published) < published
    )


def place_of(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of one dataset."""
    return Path(root).expanduser() if name == "folder" and root else data_folder(root) / name


def _parse(text: str, side: int | None, skip: bool = False) -> tuple[str, str, int | None, bool]:
    """Name, path, side and whether to skip damaged files, of `NAME` or `folder:PATH@SIDE,skip-unreadable`."""
    name, _, path = text.partition(":")
    found = re.fullmatch(rf"folder(?::(.*?))?(?:@(\d{{1,6}}))?({SKIP})?", text, re.DOTALL)
    if found:
        # A folder whose own name ends in @64 is that folder.
        if not (path and Path(path).expanduser().is_dir()):
            path, written = found[1] or "", int(found[2]) if found[2] else None
            if written is not None and side not in (None, written):
                raise ConfigurationError(f"expected one side, got {written} in {text!r} and {side}")
            side, skip = written if side is None else side, skip or bool(found[3])
        name = "folder"
    elif path or side is not None or skip:
        source(name)
        raise ConfigurationError(
            f"expected {name} alone, got a path, a side or skip-unreadable; only folder:PATH takes them"
        )
    return name, path, side, skip


def _warn_of_differences(chosen: Source, at: Path, split: str) -> None:
    checksums = Checksums(at)
    files = [file for file in chosen.version(at) if file.split in (None, split)]
    different = [file.path for file in files if not checksums.is_exact(file)]
    if different:
        warn_once(
            f"{chosen.name} in {at} differs from what was published ({different[0]}), so results on it are not "
            f"comparable with others; see `menet data verify {chosen.name}`"
        )
