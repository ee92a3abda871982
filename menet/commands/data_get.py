"""`menet data fetch` and `menet data import`: getting a dataset from its publisher, or from files one has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from menet.commands.data_verify import DataVerify
from menet.data import catalog, install

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class DataFetch:
    """Download a dataset from its publisher; a download that broke off is continued where it stopped."""

    name: Name
    """mnist, cifar10, svhn or tiny-imagenet."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    replace: bool = False
    """Put the new files in the place of those already there."""

    def __call__(self) -> int:
        source = catalog.source(self.name)
        place = install.fetch(source, self.root, self.replace)
        print(f"{self.name}: {place} (terms: {source.licence})")
        return 0


@dataclass(frozen=True)
class DataImport:
    """Copy a dataset's files into place: from the publisher's archive, or from a folder that has its files.

    What is not exactly the publisher's content is imported too, if it can be read, and said so.
    """

    name: Name
    """mnist, cifar10, svhn, tiny-imagenet or folder (any folder of images in class folders)."""

    path: Annotated[Path, tyro.conf.Positional]
    """The archive, or the folder to look in."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    replace: bool = False
    """Put the new files in the place of those already there."""

    def __call__(self) -> int:
        source = catalog.source(self.name)
        print(f"{self.name}: {install.take(source, self.path, self.root, self.replace)}")
        if source.versions:
            DataVerify(self.name, self.root)()
        return 0
