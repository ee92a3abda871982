"""Algorithm 1's new training set S′: every image masked n times and estimated, as shards of bytes."""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import nn

from menet import data
from menet.data import Dataset
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, DataError
from menet.files import replacing, write_atomically
from menet.masks import bernoulli
from menet.preprocessed import describe, rebuild
from menet.progress import reporting
from menet.seeding import Stream, stream
from menet.training.prepared import (
    DESCRIPTION,
    Description,
    checksum_path,
    fingerprint,
    is_complete,
    read_description,
    shard_path,
)

BATCH = 512


def prepare(
    dataset: str,
    defense: dict,
    folder: Path,
    *,
    root: Path | None = None,
    limit: int | None = None,
    per_shard: int = 4096,
    seed: int = 0,
) -> Description:
    """Write the first `limit` training images (all if None) as estimated by `defense`, or finish what is there.

    Copy k of an image has the k-th probability of the schedule. Shards that are there and intact are kept, so it
    can be stopped and called again. Under `torchrun` processes, on any number of machines that see the folder,
    make different shards; each shard has a random stream of its own, so the set does not depend on their number.
    """
    model = rebuild(nn.Identity(), defense)
    if not isinstance(model, MENet):
        raise ConfigurationError(f"defense is {defense!r:.200}; accepted is 'me-net'")
    for name, value in (("limit", limit), ("per_shard", per_shard)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}; accepted are whole numbers from 1")
    source = data.load(dataset, "train", root)
    count = len(source) if limit is None else min(limit, len(source))
    shape = tuple(source.images.shape[1:])
    made_of = fingerprint(source, count)
    description = Description(source.name, made_of, count, model.masks, shape, per_shard, seed, describe(model))
    worker = Worker.from_environment()
    rank, world = worker.rank, worker.world
    try:
        _claim(folder, description)
        mine = range(rank, description.shards, world)
        total = sum(len(description.range_of(shard)) for shard in mine)
        with reporting(f"prepare {source.name}", total * description.copies) as reporter:
            for shard in mine:
                if not is_complete(folder, shard):
                    _write_shard(folder, shard, _estimates(model, source, description, shard))
                reporter.advance(len(description.range_of(shard)) * description.copies)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}; complete shards are kept") from error
    return description


def _claim(folder: Path, description: Description) -> None:
    if (folder / DESCRIPTION).exists():
        if read_description(folder).as_json() != description.as_json():
            raise ConfigurationError(f"out is {folder}, which holds a set made with other settings")
        return
    write_atomically(folder / DESCRIPTION, description.as_json())


def _estimates(model: MENet, source: Dataset, description: Description, shard: int) -> np.ndarray:
    generator = stream(description.seed, Stream.PREPARE, shard)
    copies = description.copies
    chosen = description.range_of(shard)
    rows = np.empty((len(chosen) * copies, *description.shape), np.uint8)
    schedule = torch.tensor(model.schedule)
    step = max(1, BATCH // copies)
    for start in range(chosen.start, chosen.stop, step):
        stop = min(start + step, chosen.stop)
        images = source.batch(slice(start, stop))[0].repeat_interleave(copies, 0)
        mask = bernoulli(
            (len(images), *model.mask_shape(images)), schedule.repeat(stop - start), generator, images.device
        )
        with torch.no_grad():
            estimates = model.estimate(images, mask).mul(255).round().to(torch.uint8)
        first = (start - chosen.start) * copies
        rows[first : first + len(images)] = estimates.numpy()
    return rows


def _write_shard(folder: Path, shard: int, rows: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, rows, allow_pickle=False)
    with replacing(shard_path(folder, shard)) as temporary:
        temporary.write_bytes(content.getbuffer())
    # Of the content meant, not of the file written: a disk that lies is then found out.
    write_atomically(checksum_path(folder, shard), hashlib.sha256(content.getbuffer()).hexdigest() + "\n")
