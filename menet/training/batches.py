"""Which images a run trains on and is judged by, and in which order."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from menet import data
from menet.data import Dataset
from menet.data.augment import CropAndFlip
from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.seeding import Stream, stream
from menet.training.config import TrainingConfig
from menet.training.prepared import Prepared, open_prepared

SPLIT_SEED = 0
"""The split does not depend on a run's seed: runs that differ by seed alone hold out the same images."""


@dataclass(frozen=True)
class Batches:
    """The training images at `chosen`, those at `held_out` to judge epochs by, and how batches are made."""

    config: TrainingConfig
    dataset: Dataset
    chosen: Int[Tensor, " n"]
    held_out: Int[Tensor, " m"]
    prepared: Prepared | None

    @classmethod
    def of(cls, config: TrainingConfig, root: str | Path | None = None, world: int = 1) -> "Batches":
        """Load the training split and divide it; refuse a batch that cannot be filled."""
        dataset = data.load(config.dataset, "train", root)
        prepared = None
        count = len(dataset)
        if config.prepared is not None:
            prepared = open_prepared(config.prepared, dataset, config.defense)
            count = len(prepared)
        shuffled = torch.randperm(count, generator=stream(SPLIT_SEED, Stream.SPLIT))
        held_out, chosen = shuffled[: config.validation], shuffled[config.validation :]
        if config.limit is not None and config.limit > len(chosen):
            raise ConfigurationError(
                f"limit is {config.limit}, but {config.dataset} has {len(chosen)} training images "
                f"beside {len(held_out)} for validation"
            )
        chosen = chosen[: config.limit]
        if config.batch > len(chosen):
            raise ConfigurationError(
                f"batch is {config.batch}; accepted are up to {len(chosen)}, the number of training images"
            )
        if config.batch % world:
            raise ConfigurationError(f"batch is {config.batch}; accepted are multiples of the {world} processes")
        return cls(config, dataset, chosen, held_out, prepared)

    @property
    def steps(self) -> int:
        """Steps in one epoch."""
        return len(self.chosen) // self.config.batch

    def order(self, epoch: int) -> Int[Tensor, " n"]:
        """The positions of an epoch's images, and of one copy of each where a prepared set holds several.

        It follows from the seed and the epoch alone, so an epoch can be taken up in its middle.
        """
        generator = stream(self.config.seed, Stream.ORDER, epoch)
        positions = self.chosen[torch.randperm(len(self.chosen), generator=generator)]
        if self.prepared is None:
            return positions
        copies = torch.randint(self.prepared.copies, positions.shape, generator=generator)
        return positions * self.prepared.copies + copies

    def batch(
        self, order: Int[Tensor, " n"], number: int, generator: torch.Generator, place: Worker
    ) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"]]:
        """This process's part of an epoch's batch `number`.

        Augmentation is drawn for the whole batch, so it does not depend on the number of processes.
        """
        index = order[number * self.config.batch : (number + 1) * self.config.batch]
        source = self.dataset if self.prepared is None else self.prepared.dataset
        crop = CropAndFlip() if self.config.augmentation else None
        images, labels = source.batch(
            index if crop else place.part(index),
            None if crop is None else lambda pixels: place.part(crop(pixels, generator=generator)),
        )
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        labels = place.part(labels) if crop else labels
        return images.to(place.device, memory_format=layout), labels.to(place.device)
