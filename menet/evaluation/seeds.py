"""Where the random numbers of an evaluation come from: one seed, and what they are for."""

import hashlib
from typing import Literal

from menet.attacks.ranges import derived_seed

Purpose = Literal[
    "attack", "source", "clean", "scoring", "restarts", "pictures", "selection", "estimation", "audit", "replay"
]

CERTIFICATE: tuple[Purpose, Purpose] = ("selection", "estimation")


def stream(seed: int, purpose: Purpose, label: str = "") -> int:
    """A seed for one purpose of one attack, unrelated to those for other purposes.

    An attack and the scoring of what it found have different purposes, so scoring masks are fresh: they are
    never those the attack saw.
    """
    return int.from_bytes(hashlib.sha256(f"{purpose}|{label}|{seed}".encode()).digest()[:7], "big")


def at(seed: int, purpose: Purpose, label: str, place: int) -> int:
    """The seed for the batch that starts at the example `place`.

    Made as `menet.attacks.attack_range` makes its own, so that `at(seed, "attack", …)` is what it uses when
    given `stream(seed, "attack", …)`.
    """
    return derived_seed(stream(seed, purpose, label), place)
