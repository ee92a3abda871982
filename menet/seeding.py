"""Seeds: every random stream is derived from one seed and the purpose of the stream."""

import hashlib
from enum import IntEnum
from typing import Any, Literal

import torch


def derive(seed: int, place: int) -> int:
    """A seed for one place (an epoch, a batch, a shard) of a run, independent of those of other places."""
    return _hashed(f"{seed}:{place}")


class Stream(IntEnum):
    """The purpose of a random stream in training. The numbers are part of what a seed means."""

    SPLIT = 0
    WEIGHTS = 1
    ORDER = 2
    AUGMENTATION = 3
    MASKS = 4
    ATTACK = 5
    SCORE = 6
    PREPARE = 7
    FIT = 8


def stream_seed(seed: int, purpose: Stream, place: int = 0) -> int:
    """The seed of one stream of a training run at one place."""
    return derive(derive(seed, int(purpose)), place)


def stream(seed: int, purpose: Stream, place: int = 0) -> torch.Generator:
    """A generator on the CPU for one stream of a training run at one place."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, place))


Purpose = Literal[
    "attack", "source", "clean", "scoring", "restarts", "pictures", "selection", "estimation", "audit", "replay"
]
"""The purpose of a random stream in an evaluation."""


def evaluation_seed(seed: int, purpose: Purpose, label: str = "") -> int:
    """A seed for one purpose of one attack, independent of those for other purposes.

    An attack and the scoring of its adversarial examples have different purposes, so the draws that score an
    attack are fresh: never those that the attack saw.
    """
    return _hashed(f"{purpose}|{label}|{seed}")


def batch_seed(seed: int, purpose: Purpose, label: str, first: int) -> int:
    """The seed of an evaluation for the batch whose first example is `first`."""
    return derive(evaluation_seed(seed, purpose, label), first)


def reseed(model: Any, seed: int) -> None:
    """Seed a model that has randomness of its own; a deterministic model is left unchanged."""
    if hasattr(model, "reseed"):
        model.reseed(seed)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
