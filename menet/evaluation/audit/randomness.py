"""Where a model's randomness comes from, and on which draws it is scored."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from menet.evaluation.audit.audited_model import AuditedModel, Finding, StateRecorder, clearly_above, mean
from menet.evaluation.scoring import score
from menet.seeding import reseed

LUCK = 0.1
"""Robust accuracy beyond this that rests on a secret draw is worth a warning."""


def repeats_when_reseeded(audited: AuditedModel) -> Finding:
    """The same seed gives the same logits."""
    if not audited.random:
        return Finding("pass", "The model is deterministic, so one draw is enough for all checks.")
    if not hasattr(audited.model, "reseed"):
        return Finding("warn", "The model is random and has no reseed(seed), so no number here is reproducible.")
    seed, logits = audited.seed(), []
    for _ in range(2):
        reseed(audited.model, seed)
        with torch.no_grad():
            logits.append(audited.model(audited.images))
    numbers = {"largest difference": (logits[0] - logits[1]).abs().max().item()}
    if _equal_up_to_rounding(*logits):
        return Finding("pass", "The model is random, and its logits repeat when it is reseeded.", numbers)
    return Finding(
        "fail", "With the same seed the model gives other logits: results are not reproducible.", numbers
    )


def own_generator(audited: AuditedModel) -> Finding:
    """The model draws from a generator of its own, not from one that others reseed.

    Three calls: the global generators in one state, in the same state again, and in another.
    """
    before, seed = _states(), audited.seed()
    other = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": np.random.RandomState(seed % 2**32).get_state(),
        "python": random.Random(seed).getstate(),
    }
    logits, used = [], set()
    try:
        for state in (before, before, {**before, **other}):
            _restore(state)
            reseed(audited.model, seed)
            with torch.no_grad():
                logits.append(audited.model(audited.images))
            used |= {name for name, value in _states().items() if not _same(value, state[name])}
        # Type checkers and the like draw from Python's generator too; only logits that follow it count.
        used -= {"python"}
    finally:
        _restore(before)
    numbers = {"generators used": sorted(used)}
    if _equal_up_to_rounding(logits[0], logits[1]) and not _equal_up_to_rounding(logits[0], logits[2]):
        return Finding(
            "fail",
            "The model draws from a global generator: attacks that reseed it (AutoAttack does, at every call) "
            "replay its draws, and it looks weaker or stronger than it is.",
            numbers,
        )
    if used:
        return Finding(
            "warn", "The model uses a global generator, though its logits do not depend on it.", numbers
        )
    return Finding("pass", "The model does not use or depend on a global generator.", numbers)


def fresh_scoring(audited: AuditedModel) -> Finding:
    """Reported numbers are scored on draws that the attack has not seen, and agree with an independent score."""
    if not audited.random:
        return Finding("pass", "The model is deterministic, so there are no draws to keep apart.")
    attack, recorder = audited.attack, StateRecorder(audited.model)
    scores = audited.settings.scorer(recorder, attack.images, audited.labels, audited.draws, attack.seed)
    reported = (scores.ranks == 0).double().mean(0)
    fresh, shared = audited.robust, len(attack.states & recorder.states)
    numbers = {"reported": mean(reported), "fresh draws": mean(fresh), "draws shared with the attack": shared}
    if shared:
        return Finding("fail", "Scores are taken on draws that the attack itself has seen.", numbers)
    tolerance = audited.settings.tolerance
    if clearly_above(reported, fresh, tolerance) or clearly_above(fresh, reported, tolerance):
        return Finding("fail", "The reported score differs from that on fresh draws.", numbers)
    return Finding("pass", "Scores are taken on fresh draws.", numbers)


def attack_draws(audited: AuditedModel) -> Finding:
    """How much a score on the attack's own draws, or on a single draw, would mislead."""
    if not audited.random:
        return Finding("pass", "The model is deterministic, so one draw is enough.")
    attack, fresh = audited.attack, audited.robust
    draws, max_batch = audited.draws, audited.settings.max_batch
    reseed(audited.model, audited.seed())
    ranks = score(audited.model, attack.images, audited.labels, draws, max_batch).ranks
    numbers = {
        "fresh draws": mean(fresh),
        "single draw": mean(ranks[0] == 0),
        f"correct under all of {draws}": mean((ranks == 0).all(0)),
        f"correct under all of {draws}, clean": mean(audited.clean == 1),
    }
    if not hasattr(audited.model, "reseed"):
        return Finding("pass", "The attack's own draws cannot be replayed; these are scores on others.", numbers)
    reseed(audited.model, attack.seed)
    own = score(audited.model, attack.images, audited.labels, draws, max_batch)
    replayed = (own.ranks == 0).double().mean(0)
    numbers["attack's own draws"] = mean(replayed)
    if clearly_above(fresh, replayed, audited.settings.tolerance):
        return Finding(
            "warn",
            "The attack has overfitted to the draws it saw: take more draws per step.",
            numbers,
        )
    return Finding("pass", "The attack generalizes to draws it has not seen.", numbers)


def frozen_draws(audited: AuditedModel) -> Finding:
    """How much of the robust accuracy is luck of the draw: attacked and scored on one fixed draw per image."""
    if not audited.random:
        return Finding("pass", "The model is deterministic, so nothing rests on the draw.")
    if not hasattr(audited.model, "reseed"):
        return Finding("warn", "The model has no reseed(seed), so its draws cannot be frozen.")
    frozen = _Frozen(audited.model, audited.seed())
    # As many gradients as the audited attack takes: with the draw fixed, each of them is a step.
    steps = min(100, audited.settings.steps * audited.eot)
    images = audited.adversarial(audited.pgd(steps=steps, eot=1, max_batch=len(audited.images)), frozen)
    with torch.no_grad():
        known = (frozen(images).argmax(1) == audited.labels).double()
    numbers = {"fresh draws": mean(audited.robust), "frozen draws": mean(known)}
    if clearly_above(audited.robust, known, LUCK):
        return Finding(
            "warn",
            f"{numbers['fresh draws'] - numbers['frozen draws']:.0%} of the images withstand the attack only "
            "because the draw is secret: say so, and do not serve the same draw twice.",
            numbers,
        )
    return Finding("pass", "Robust accuracy does not rest on keeping the draw secret.", numbers)


class _Frozen:
    """A random model that sees every batch of the same size under the same draws."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.seed = model, seed

    def __call__(self, images: Tensor) -> Tensor:
        reseed(self.model, self.seed)
        logits: Tensor = self.model(images)
        return logits


def _equal_up_to_rounding(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5)


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
