"""Where a model's randomness comes from."""

import random
from typing import Any

import numpy as np
import torch

from menet.evaluation.checks.subject import Finding, Subject, alike
from menet.seeding import reseed


def answers_repeat(subject: Subject) -> Finding:
    """The same seed gives the same answers."""
    if not subject.random:
        return Finding("pass", "The model answers alike each time, so one draw is enough for everything below.")
    if not hasattr(subject.model, "reseed"):
        return Finding(
            "warn", "The model is random and has no reseed(seed), so that no number here can be repeated exactly."
        )
    seed, answers = subject.seed(), []
    for _ in range(2):
        reseed(subject.model, seed)
        with torch.no_grad():
            answers.append(subject.model(subject.images))
    numbers = {"largest change": (answers[0] - answers[1]).abs().max().item()}
    if alike(*answers):
        return Finding("pass", "The model is random, and repeats its answers when reseeded.", numbers)
    return Finding("fail", "Reseeded alike, the model answers differently: results do not repeat.", numbers)


def own_generator(subject: Subject) -> Finding:
    """The model draws from a generator of its own, not from one that others reseed.

    Three calls: the global generators in one state, in the same state again, and in another.
    """
    before, own = _states(), subject.seed()
    other = {
        "torch": torch.Generator().manual_seed(own).get_state(),
        "numpy": np.random.RandomState(own % 2**32).get_state(),
        "python": random.Random(own).getstate(),
    }
    answers, used = [], set()
    try:
        for state in (before, before, {**before, **other}):
            _restore(state)
            reseed(subject.model, own)
            with torch.no_grad():
                answers.append(subject.model(subject.images))
            used |= {name for name, value in _states().items() if not _same(value, state[name])}
        # Checkers of types and the like draw from Python's own too; only answers that follow it tell.
        used -= {"python"}
    finally:
        _restore(before)
    numbers = {"generators used": sorted(used)}
    if alike(answers[0], answers[1]) and not alike(answers[0], answers[2]):
        return Finding(
            "fail",
            "The model draws from a global generator: attacks that reseed it (AutoAttack does, at every call) "
            "replay its masks, and it looks weaker or stronger than it is.",
            numbers,
        )
    if used:
        return Finding("warn", "The model uses a global generator, though its answers do not follow it.", numbers)
    return Finding("pass", "No global generator is used or followed.", numbers)


def _states() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(np.array_equal(first, second))
