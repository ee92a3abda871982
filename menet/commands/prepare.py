"""`menet prepare`: the training set of estimates of Algorithm 1, as shards on disk."""

from dataclasses import dataclass
from pathlib import Path

from menet.commands import Json, Output, printing
from menet.commands.options import Dataset, Device, Root, Seed, Side, SkipUnreadable
from menet.commands.train import P, defense_settings


@dataclass(frozen=True)
class Prepare:
    """Mask and estimate every training image n times in advance (Algorithm 1 of the paper).

    `menet train DATASET --defense me-net --prepared FOLDER` with the same settings then trains on the estimates.
    Without it, training draws a fresh mask for each image and step, which costs little and is more varied; this
    is the paper's way. Safe to interrupt: rerun the same command to resume. Under torchrun the processes divide
    the work.
    """

    dataset: Dataset

    out: Path
    """Folder for the shards; about n times the size of the dataset's images."""

    estimator: str | None = None
    """nuclear-norm (default), usvt, soft-impute, tubal, or mask-only."""

    p: P = None

    masks: int | None = None
    """Masks of each image, the paper's n. Default: 10."""

    channels: str | None = None
    """joint (default) or separate."""

    limit: int | None = None
    """Number of images, a stratified sample. Default: all."""

    per_shard: int = 4096
    """Images in one file, with all their estimates."""

    seed: Seed = 0

    side: Side = None

    skip_unreadable: SkipUnreadable = False

    root: Root = None

    device: Device = "auto"

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.commands.options import check_dataset, device_of
        from menet.training.prepared import prepare

        made = prepare(
            check_dataset(self.dataset, self.side, self.skip_unreadable),
            defense_settings("me-net", self.estimator, self.p, self.masks, self.channels, None),
            self.out,
            root=self.root,
            limit=self.limit,
            per_shard=self.per_shard,
            seed=self.seed,
            device=device_of(self.device),
        )
        out.value(images=made.images, copies=made.copies, shards=made.shards, folder=self.out)
        print(f"{made.images:,} images, {made.copies} estimates each, in {_shards(made.shards)}: {self.out}")
        return 0


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count:,} shards"
