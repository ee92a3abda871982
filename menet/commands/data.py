"""`menet data list`, `fetch`, `import` and `verify`: getting datasets and checking them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from menet.commands.choices import Root

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class DataList:
    """List the datasets: whether they are here, how large they are, and under which license."""

    root: Root = None

    def __call__(self) -> int:
        from rich.console import Console

        from menet.data.catalog import SOURCES
        from menet.data.dataset import data_folder
        from menet.report.tables import Table

        place = data_folder(self.root)
        columns = ("name", "here", "images", "classes", "size", "license")
        rows = tuple(_row(source, place / source.name) for source in SOURCES.values())
        Table("", columns, rows).print(lines=False)
        Console(highlight=False).print(
            f"\nEach dataset has a folder in {place} (set MENET_DATA to use another place).\n"
            "Images: training+test as published; menet data verify NAME compares.\n"
            "Get one with menet data fetch NAME, or menet data import NAME PATH if you have its files.",
            soft_wrap=True,
        )
        return 0


@dataclass(frozen=True)
class DataFetch:
    """Download a dataset from its publisher. Safe to interrupt: rerun the same command to resume."""

    name: Name
    """mnist, cifar10, svhn or tiny-imagenet."""

    root: Root = None

    replace: bool = False
    """Replace the files that are already there."""

    def __call__(self) -> int:
        from menet.data import catalog, install

        source = catalog.source(self.name)
        place = install.fetch(source, self.root, self.replace)
        print(f"{self.name}: {place} (terms: {source.license})")
        return 0


@dataclass(frozen=True)
class DataImport:
    """Copy a dataset's files into place, from the publisher's archive or from a folder that has them.

    Files that differ from the publisher's are imported too if they can be read, with a warning.
    """

    name: Name
    """mnist, cifar10, svhn, tiny-imagenet or folder (any folder with one subfolder of images per class)."""

    path: Annotated[Path, tyro.conf.Positional]
    """The archive, or the folder to search."""

    root: Root = None

    replace: bool = False
    """Replace the files that are already there."""

    def __call__(self) -> int:
        from menet.data import catalog, install

        source = catalog.source(self.name)
        print(f"{self.name}: {install.take(source, self.path, self.root, self.replace)}")
        if source.versions:
            DataVerify(self.name, self.root)()
        return 0


@dataclass(frozen=True)
class DataVerify:
    """Compare a dataset with its publisher's checksums, reading every byte. The exit code is 1 if it differs."""

    name: Name
    """mnist, cifar10, svhn or tiny-imagenet."""

    root: Root = None

    def __call__(self) -> int:
        from menet.data import catalog
        from menet.data.catalog import place_of
        from menet.data.checksums import Checksums
        from menet.data.dataset import require_file
        from menet.errors import DataError

        source = catalog.source(self.name)
        if not source.versions:
            raise DataError(f"{self.name} has no publisher's checksums to compare with")
        place = require_file(place_of(self.name, self.root), self.name)
        checksums = Checksums(place, remember=False)
        files = source.version(place)
        width = max(len(file.path) for file in files)
        exact = []
        for file in files:
            exact.append(checksums.is_exact(file))
            here = (place / file.path).exists() or (place / file.path).with_suffix("").exists()
            verdict = "as published" if exact[-1] else "differs from what was published" if here else "missing"
            if here and not exact[-1] and file.is_folder:
                verdict = "not known to be as published (only a folder unpacked by menet from the archive is)"
            print(f"{file.path:<{width}}  {verdict}")
        whole = all(exact)
        print(f"{self.name}: {'exactly' if whole else 'not exactly'} what its publisher offers")
        return 0 if whole else 1


def _row(source: Any, place: Path) -> tuple[Any, ...]:
    from menet.report.tables import Cell

    here = place.is_dir() and not source.embedded
    size = (
        sum(os.path.getsize(Path(at) / name) for at, _, names in os.walk(place) for name in names) if here else 0
    )
    return (
        Cell(source.name),
        Cell("built in" if source.embedded else "yes" if here else "no"),
        Cell("+".join(f"{count:,}" for count in source.images) if source.images else "any", number=True),
        Cell(str(source.classes or "any"), number=True),
        Cell(f"{size / 1e6:,.0f} MB" if here else "", number=True),
        Cell(source.license),
    )
