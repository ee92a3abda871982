"""Algorithm 1's training set S′: every image masked n times and estimated, as shards of bytes on disk.

`prepare` writes the set and `open_prepared` reads it by memory map. The description (`prepared.json`) and every
shard carry a SHA-256, and what is read back is checked against the dataset and the shards before it is used.
"""

import hashlib
import io
import json
import tokenize
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from menet import data
from menet.data import Dataset
from menet.data.dataset import Joined, warn_of_missing_classes
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, DataError
from menet.files import replacing, sha256, write_atomically
from menet.masks import bernoulli
from menet.preprocessed import describe, rebuild
from menet.progress import reporting
from menet.seeding import Stream, stream

DESCRIPTION = "prepared.json"
BATCH_SIZE = 512
REMEDY = "run `menet prepare` with the same settings to repair it"


@dataclass(frozen=True)
class Description:
    """What a folder of shards holds: all `copies` of `per_shard` images per shard, fewer images in the last."""

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
        """The number of shard files."""
        return -(-self.images // self.per_shard)

    def range_of(self, shard: int) -> range:
        """The images of a shard."""
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, self.images))

    def shard_shape(self, shard: int) -> tuple[int, ...]:
        """The shape of a shard's array: (copies of its images, channels, height, width)."""
        return (len(self.range_of(shard)) * self.copies, *self.shape)

    @property
    def checksum(self) -> str:
        """The SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def as_json(self) -> str:
        """The content of `prepared.json`."""
        return json.dumps({**asdict(self), "sha256": self.checksum}, indent=1) + "\n"


@dataclass(frozen=True)
class Prepared:
    """An opened set: entry i·copies + k of `dataset` is estimate k of image i."""

    dataset: Dataset
    copies: int

    def __len__(self) -> int:
        return len(self.dataset) // self.copies


def prepare(
    dataset: str,
    defense: dict,
    folder: Path,
    *,
    root: Path | None = None,
    limit: int | None = None,
    per_shard: int = 4096,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Description:
    """Write a stratified sample of `limit` training images (all if None) as estimated by `defense`.

    Copy k of an image is masked with the k-th probability of the schedule. Safe to interrupt: call it again to
    resume; intact shards are kept. Under `torchrun` processes, on any number of machines that see the folder,
    make different shards; each shard has its own random stream, so the set does not depend on their number.
    """
    model = rebuild(nn.Identity(), defense)
    if not isinstance(model, MENet) or model.encoding != "estimate" or model.mask == "cells":
        raise ConfigurationError(f"expected defense 'me-net' that shows estimates, got {defense!r:.200}")
    for name, value in (("limit", limit), ("per_shard", per_shard)):
        if value is not None and value < 1:
            raise ConfigurationError(f"expected {name} >= 1, got {value}")
    source = data.load(dataset, "train", root).sample(limit)
    count = len(source)
    warn_of_missing_classes(source, 0, count, f"the {count} training images")
    shape = tuple(source.images.shape[1:])
    made_of = fingerprint(source, count)
    description = Description(source.name, made_of, count, model.masks, shape, per_shard, seed, describe(model))
    worker = Worker.from_environment()
    try:
        _claim(folder, description)
        mine = range(worker.rank, description.shards, worker.world)
        total = sum(len(description.range_of(shard)) for shard in mine)
        with reporting(f"prepare {source.name}", total * description.copies) as reporter:
            for shard in mine:
                if damage(folder, description, shard):
                    _write_shard(folder, shard, _estimates(model, source, description, shard, device))
                reporter.advance(len(description.range_of(shard)) * description.copies)
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}; complete shards are kept") from error
    return description


def open_prepared(folder: str | Path, source: Dataset, defense: Mapping[str, Any]) -> Prepared:
    """Open the set made from `source` by `defense`; refuse one made otherwise, incomplete or damaged."""
    folder = Path(folder)
    description = read_description(folder)
    if description.images <= len(source):
        source = source.sample(description.images)
    _check_origin(folder, description, source, defense)
    parts = []
    for shard in range(description.shards):
        problem = damage(folder, description, shard)
        if problem:
            raise DataError(f"{shard_path(folder, shard)} {problem}; {REMEDY}")
        pixels = np.load(shard_path(folder, shard), mmap_mode="r", allow_pickle=False)
        parts.append(pixels.reshape(len(pixels), -1))
    labels = source.labels[: description.images].repeat_interleave(description.copies)
    channels, height, width = description.shape
    joined = Joined(parts, (channels, height, width))
    dataset = Dataset(source.name, "train", joined, labels, source.classes, source.mean, source.std)
    return Prepared(dataset, description.copies)


def read_description(folder: Path) -> Description:
    """The content of `prepared.json`, refused if a field has changed since it was written."""
    path = folder / DESCRIPTION
    names = [one.name for one in fields(Description)]
    try:
        found = json.loads(path.read_bytes())
        checksum = found.pop("sha256")
        description = Description(**{**found, "shape": tuple(found["shape"])})
        intact = checksum == description.checksum
    except FileNotFoundError:
        raise ConfigurationError(f"no prepared set in {folder}; run `menet prepare` to make one") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"cannot read {path}: expected an object with {', '.join(names)} and sha256, got {error!r:.200}; "
            "delete the folder and run `menet prepare` again"
        ) from error
    if not intact:
        raise DataError(
            f"{path} does not match its checksum: it has changed since it was written; "
            "delete the folder and run `menet prepare` again"
        )
    sizes = (description.images, description.copies, description.per_shard, *description.shape)
    if len(description.shape) != 3 or not all(type(size) is int and size >= 1 for size in sizes):
        raise DataError(f"{path}: expected positive sizes and a shape (channels, height, width), got {sizes}")
    return description


def shard_path(folder: Path, shard: int) -> Path:
    """The path of a shard."""
    return folder / f"shard-{shard:05d}.npy"


def checksum_path(folder: Path, shard: int) -> Path:
    """The path of a shard's checksum."""
    return shard_path(folder, shard).with_suffix(".sha256")


def damage(folder: Path, description: Description, shard: int) -> str | None:
    """What is wrong with a shard; None if it holds what was written and what the description says."""
    path, checksum = shard_path(folder, shard), checksum_path(folder, shard)
    if not path.is_file() or not checksum.is_file():
        return "is missing"
    # The shape first: it is cheap, and it is what the description says rather than what the file claims.
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, OverflowError, tokenize.TokenError) as error:
        return f"is damaged ({' '.join(str(error).split())[:120]})"
    shape = description.shard_shape(shard)
    if pixels.shape != shape or pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
        return f"does not fit {DESCRIPTION}: expected uint8 {shape}, got {pixels.dtype} {pixels.shape}"
    if checksum.read_bytes().strip() != sha256(path).encode():
        return "does not match its checksum"
    return None


def fingerprint(source: Dataset, images: int) -> str:
    """A checksum of a dataset's labels and of every hundredth of its first `images` images."""
    digest = hashlib.sha256(source.labels[:images].numpy().tobytes())
    digest.update(source.images[torch.arange(0, images, 100)].numpy().tobytes())
    return digest.hexdigest()


def _check_origin(folder: Path, description: Description, source: Dataset, defense: Mapping[str, Any]) -> None:
    """Refuse a set that was not made from this dataset by this defense."""
    shape = tuple(source.images.shape[1:])
    if (
        description.dataset != source.name
        or description.images > len(source)
        or description.shape != shape
        or description.fingerprint != fingerprint(source, description.images)
    ):
        raise ConfigurationError(
            f"{folder} was prepared from other images: expected {source.name!r} as loaded here, got "
            f"{description.dataset!r}; run `menet prepare` again in another folder"
        )
    made_by = description.defense
    for name in sorted((made_by.keys() | defense.keys()) - {"gradient"}):
        if made_by.get(name) != defense.get(name):
            raise ConfigurationError(
                f"{folder} was prepared with other settings: expected {name} {defense.get(name)!r}, "
                f"got {made_by.get(name)!r}; use the same settings, or run `menet prepare` in another folder"
            )
    if description.copies != made_by.get("masks"):
        raise DataError(
            f"{folder / DESCRIPTION}: expected copies {made_by.get('masks')}, got {description.copies}"
        )


def _claim(folder: Path, description: Description) -> None:
    if (folder / DESCRIPTION).exists():
        if read_description(folder).checksum != description.checksum:
            raise ConfigurationError(f"{folder} was prepared with other settings; choose another folder")
        return
    write_atomically(folder / DESCRIPTION, description.as_json())


def _estimates(
    model: MENet, source: Dataset, description: Description, shard: int, device: torch.device | str
) -> np.ndarray:
    generator = stream(description.seed, Stream.PREPARE, shard)
    copies = description.copies
    chosen = description.range_of(shard)
    pixels = np.empty(description.shard_shape(shard), np.uint8)
    schedule = torch.tensor(model.schedule)
    step = max(1, BATCH_SIZE // copies)
    for start in range(chosen.start, chosen.stop, step):
        stop = min(start + step, chosen.stop)
        images = source.batch(slice(start, stop))[0].to(device).repeat_interleave(copies, 0)
        mask = bernoulli(
            (len(images), *model.mask_shape(images)), schedule.repeat(stop - start), generator, images.device
        )
        with torch.no_grad():
            estimates = model.estimate(images, mask).mul(255).round().to(torch.uint8)
        first = (start - chosen.start) * copies
        pixels[first : first + len(images)] = estimates.cpu().numpy()
    return pixels


def _write_shard(folder: Path, shard: int, pixels: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, pixels, allow_pickle=False)
    with replacing(shard_path(folder, shard)) as temporary:
        temporary.write_bytes(content.getbuffer())
    # Of the content in memory, not of the file: so that a write that went wrong on disk is found.
    write_atomically(checksum_path(folder, shard), hashlib.sha256(content.getbuffer()).hexdigest() + "\n")
