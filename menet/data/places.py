"""Where datasets and what is made from them are kept."""

import os
from pathlib import Path

import pooch

from menet.errors import DataError


def data_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds one folder per dataset: `root`, else `MENET_DATA`, else in the user's cache."""
    chosen = root or os.environ.get("MENET_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder() / "data"


def cache_folder() -> Path:
    """The user's cache folder for this project; whatever is in it but `data` can be made again."""
    return Path(pooch.os_cache("menet"))


def require(path: Path, name: str) -> Path:
    """`path`, if it is there; otherwise an error that says how to get the dataset."""
    if not path.exists():
        raise DataError(
            f"{name} is not here ({path} is missing): `menet data fetch {name}` downloads it, "
            f"`menet data import {name} PATH` takes files you already have"
        )
    return path
