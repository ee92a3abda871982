"""`menet prepare`: Algorithm 1's training set of estimates, as shards on disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from menet.commands.train import defense_settings
from menet.training.prepare import prepare


@dataclass(frozen=True)
class Prepare:
    """Mask and estimate every training image n times, once and for all (Algorithm 1 of the paper).

    `menet train DATASET --defense me-net --prepared FOLDER` with the same settings then trains on what was
    written. Training draws fresh masks at each step otherwise, which costs little and shows the network more of
    them; this is the paper's way. Stopped, it can be called again; under torchrun processes share the work.
    """

    dataset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET")]
    """digits, mnist, cifar10, svhn, tiny-imagenet, or folder:PATH."""

    out: Path
    """Folder for the shards; about n times the size of the dataset's images."""

    estimator: str | None = None
    """nuclear-norm (if not given), usvt, soft-impute, tensor, or mask-only."""

    p: tuple[float, float] | None = None
    """Observation probabilities from a to b; 0.4 0.6 if not given."""

    masks: int | None = None
    """Copies of each image, the paper's n; 10 if not given."""

    channels: str | None = None
    """joint (if not given) or separate."""

    limit: int | None = None
    """Only so many images from the start."""

    per_shard: int = 4096
    """Images in one file, with all their copies."""

    seed: int = 0
    """What the masks follow from."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    def __call__(self) -> int:
        made = prepare(
            self.dataset,
            defense_settings("me-net", self.estimator, self.p, self.masks, self.channels, None),
            self.out,
            root=self.root,
            limit=self.limit,
            per_shard=self.per_shard,
            seed=self.seed,
        )
        print(f"{made.images:,} images, {made.copies} estimates each, in {made.shards} shards: {self.out}")
        return 0
