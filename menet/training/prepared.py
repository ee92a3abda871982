"""A prepared set S′ (Algorithm 1) as it lies on disk: verified when opened, read by memory map."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from menet.data import Dataset
from menet.data.dataset import Joined
from menet.errors import ConfigurationError, DataError
from menet.files import sha256

DESCRIPTION = "prepared.json"


@dataclass(frozen=True)
class Description:
    """What a folder of shards holds; a shard has all `copies` of `per_shard` images, the last one of fewer."""

    dataset: str
    fingerprint: str
    """A checksum of the images and labels it was made from."""
    images: int
    copies: int
    shape: tuple[int, ...]
    per_shard: int
    seed: int
    defense: dict[str, Any]

    @property
    def shards(self) -> int:
        """How many files the set is divided into."""
        return -(-self.images // self.per_shard)

    def range_of(self, shard: int) -> range:
        """The images of a shard."""
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, self.images))

    def as_json(self) -> str:
        """As it is written in `prepared.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class Prepared:
    """An opened set: row i·copies + k of `dataset` is copy k of image i."""

    dataset: Dataset
    copies: int

    def __len__(self) -> int:
        return len(self.dataset) // self.copies


def open_prepared(folder: str | Path, source: Dataset, defense: Mapping[str, Any]) -> Prepared:
    """Open the set made from `source` by `defense`; refuse one made otherwise, incomplete or damaged."""
    folder = Path(folder)
    description = read_description(folder)
    if description.dataset != source.name or description.fingerprint != fingerprint(source, description.images):
        raise ConfigurationError(
            f"prepared is {folder}, which was made from {description.dataset!r} as it then was, "
            f"not from this {source.name!r}"
        )
    for name, value in description.defense.items():
        if name != "gradient" and defense.get(name) != value:
            raise ConfigurationError(
                f"prepared is {folder}, which was made with {name} = {value!r}, not {defense.get(name)!r}"
            )
    parts = []
    for shard in range(description.shards):
        if not is_complete(folder, shard):
            raise DataError(
                f"{shard_path(folder, shard)} is missing, damaged or not what was written: "
                "`menet prepare` with the same settings makes it again"
            )
        rows = np.load(shard_path(folder, shard), mmap_mode="r", allow_pickle=False)
        parts.append(rows.reshape(len(rows), -1))
    labels = source.labels[: description.images].repeat_interleave(description.copies)
    channels, height, width = description.shape
    joined = Joined(parts, (channels, height, width))
    dataset = Dataset(source.name, "train", joined, labels, source.classes, source.mean, source.std)
    return Prepared(dataset, description.copies)


def read_description(folder: Path) -> Description:
    """What `prepared.json` says."""
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_text())
        return Description(**{**found, "shape": tuple(found["shape"])})
    except FileNotFoundError:
        raise ConfigurationError(
            f"prepared is {folder}, but {path} is missing: `menet prepare` makes one"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        names = ", ".join(one.name for one in fields(Description))
        raise DataError(f"{path} cannot be read as an object with the fields {names}: {error}") from error


def shard_path(folder: Path, shard: int) -> Path:
    """Where a shard lies; its checksum lies beside it as `.sha256`."""
    return folder / f"shard-{shard:05d}.npy"


def checksum_path(folder: Path, shard: int) -> Path:
    """Where a shard's checksum lies."""
    return shard_path(folder, shard).with_suffix(".sha256")


def is_complete(folder: Path, shard: int) -> bool:
    """Whether a shard is there with just the content that was written."""
    path, checksum = shard_path(folder, shard), checksum_path(folder, shard)
    return path.is_file() and checksum.is_file() and checksum.read_text().strip() == sha256(path)


def fingerprint(source: Dataset, images: int) -> str:
    """A checksum of a dataset's labels and of every hundredth of its first `images` images."""
    digest = hashlib.sha256(source.labels[:images].numpy().tobytes())
    digest.update(source.images[torch.arange(0, images, 100)].numpy().tobytes())
    return digest.hexdigest()
