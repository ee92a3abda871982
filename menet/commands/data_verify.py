"""`menet data verify`: whether a dataset is byte for byte what its publisher offers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from menet.data import catalog
from menet.data.checksums import Checksums
from menet.data.loading import place_of
from menet.data.places import require
from menet.errors import DataError


@dataclass(frozen=True)
class DataVerify:
    """Compare a dataset with its publisher's checksums, reading every byte; exits with 1 where it differs."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """mnist, cifar10, svhn or tiny-imagenet."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    def __call__(self) -> int:
        source = catalog.source(self.name)
        if not source.versions:
            raise DataError(f"{self.name} has no publisher's checksums to compare with")
        place = require(place_of(self.name, self.root), self.name)
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
