"""Seeds for the random streams of a run: each purpose has its own, all follow from the run's one seed."""

from enum import IntEnum

import torch

from menet.attacks.ranges import derived_seed


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of what a seed means; they do not change."""

    SPLIT = 0
    WEIGHTS = 1
    ORDER = 2
    AUGMENTATION = 3
    MASKS = 4
    ATTACK = 5
    SCORE = 6
    PREPARE = 7
    FIT = 8


def seed_for(seed: int, purpose: Purpose, place: int = 0) -> int:
    """The seed of one purpose, at one place (an epoch, a batch, a shard) of a run."""
    return derived_seed(derived_seed(seed, int(purpose)), place)


def stream(seed: int, purpose: Purpose, place: int = 0) -> torch.Generator:
    """A generator on the CPU for one purpose at one place of a run."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, place))
