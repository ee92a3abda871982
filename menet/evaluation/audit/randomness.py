"""The model under audit, what a check returns, and the checks of the model's randomness.

Where its randomness comes from, and on which draws it is scored; `attack.py` has the checks of the attack.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from menet.attacks import PGD, Attack, ThreatModel
from menet.attacks.base import Model, is_deterministic
from menet.attacks.losses import MAX_BATCH
from menet.evaluation.runner import Scores, require_positive, score
from menet.seeding import evaluation_seed, reseed

Status = Literal["pass", "warn", "fail"]

Scorer = Callable[[Any, Tensor, Tensor, int, int], Scores]
"""A way to score: (model, images, labels, draws, seed of the attack) → scores. Its draws should be fresh."""

LUCK = 0.1
"""Robust accuracy beyond this that rests on a secret draw is worth a warning."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: its status, the numbers behind it, and one sentence on what they mean."""

    status: Status
    meaning: str
    numbers: dict[str, Any] = field(default_factory=dict)
    name: str = ""


def score_fresh(model: Any, images: Tensor, labels: Tensor, draws: int, seed: int) -> Scores:
    """The project's own way to score: on draws independent of those of the attack."""
    reseed(model, evaluation_seed(seed, "scoring"))
    return score(model, images, labels, draws)


@dataclass(frozen=True)
class AuditSettings:
    """The evaluation to audit, and the compute to spend on it."""

    threat: ThreatModel = field(default_factory=ThreatModel)
    attack: Any = None
    """The attack behind the reported numbers, or any callable with its signature; None for PGD with `steps` and
    `eot`."""
    scorer: Scorer = score_fresh
    """The way in which the reported numbers are scored."""
    steps: int = 40
    eot: int = 20
    step_sweep: tuple[int, ...] = (1, 5, 10, 20, 40, 100)
    eot_sweep: tuple[int, ...] = (1, 10, 20, 40)
    epsilon_sweep: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """Multiples of epsilon; the sweep ends at the epsilon that allows every image."""
    draws: int = 50
    """Fresh random draws behind each accuracy."""
    max_queries: int = 1000
    """Query budget of the black-box attack."""
    tolerance: float = 0.02
    """Differences in accuracy below this are ignored."""
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass."""

    def __post_init__(self) -> None:
        require_positive(self, "steps", "eot", "draws", "max_queries", "max_batch")

    def quick(self) -> "AuditSettings":
        """The same with about a tenth of the compute: enough to find flaws, too little to publish."""
        return replace(
            self,
            steps=min(self.steps, 20),
            eot=min(self.eot, 10),
            step_sweep=(1, 5, 20),
            eot_sweep=(1, 5, 10, 20),
            epsilon_sweep=(0.0, 1.0, 4.0),
            draws=min(self.draws, 20),
            max_queries=min(self.max_queries, 150),
        )


class AuditedAttack(NamedTuple):
    """The result of the audited attack."""

    seed: int
    images: Tensor
    candidates: Tensor
    loss_history: Tensor | None
    states: frozenset[bytes]
    """Hashes of the generator states that the model drew from meanwhile."""


class StateRecorder:
    """A model that records the state of its generator at every call."""

    def __init__(self, model: Any) -> None:
        self._model, self.states = model, set[bytes]()

    def __call__(self, images: Tensor) -> Tensor:
        own = getattr(self._model, "generator", None)
        state = own.get_state() if isinstance(own, torch.Generator) else torch.get_rng_state()
        self.states.add(hashlib.sha256(state.cpu().numpy().tobytes()).digest())
        return self._model(images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass(frozen=True)
class AuditedModel:
    """A model with examples and settings; what several checks need is computed once."""

    model: Any
    images: Float[Tensor, "b c h w"]
    labels: Tensor
    settings: AuditSettings
    base_seed: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)

    def begin(self, name: str) -> None:
        """Draw the seeds from now on for what is called `name`, whatever was computed before it."""
        self.generator.manual_seed(evaluation_seed(self.base_seed, "audit", name))

    def seed(self) -> int:
        """A seed that nothing else in the audit uses."""
        return int(torch.randint(2**62, (), generator=self.generator))

    @contextmanager
    def _apart(self, name: str) -> Iterator[None]:
        """Seeds for what several checks share: the same ones, whichever of them needs it first."""
        state = self.generator.get_state()
        self.begin(name)
        yield
        self.generator.set_state(state)

    @cached_property
    def random(self) -> bool:
        """Whether the logits of the same images differ from call to call."""
        return not is_deterministic(self.model, self.images)

    @cached_property
    def classes(self) -> int:
        with torch.no_grad():
            return int(self.model(self.images[:1]).shape[1])

    @property
    def draws(self) -> int:
        return self.settings.draws if self.random else 1

    @property
    def eot(self) -> int:
        return self.settings.eot if self.random else 1

    def pgd(self, **changes: Any) -> PGD:
        """PGD with the settings of the audit and some changes."""
        settings = self.settings
        usual = {
            "threat": settings.threat,
            "steps": settings.steps,
            "eot": self.eot,
            "max_batch": settings.max_batch,
        }
        return PGD(**{**usual, **changes})

    def accuracy(self, images: Tensor) -> Float[Tensor, " b"]:
        """For each example, the fraction of fresh draws that classify its image correctly."""
        reseed(self.model, self.seed())
        found = score(self.model, images, self.labels, self.draws, self.settings.max_batch)
        return (found.ranks == 0).double().mean(0)

    def adversarial(self, attack: Attack, model: Model | None = None) -> Tensor:
        """The adversarial images of `attack`, on `model` if given."""
        attacked = self.model if model is None else model
        reseed(attacked, self.seed())
        random = torch.Generator().manual_seed(self.seed())
        return attack(attacked, self.images, self.labels, generator=random).images

    @cached_property
    def clean(self) -> Tensor:
        """The accuracy on clean images, by example."""
        with self._apart("clean accuracy"):
            return self.accuracy(self.images)

    @cached_property
    def attack(self) -> AuditedAttack:
        """The audited attack, run once."""
        attack = self.pgd() if self.settings.attack is None else self.settings.attack
        with self._apart("audited attack"):
            seed, recorder = self.seed(), StateRecorder(self.model)
            random = torch.Generator().manual_seed(self.seed())
        reseed(self.model, seed)
        options: dict[str, Any] = {"loss_history": True} if isinstance(attack, Attack) else {}
        result = attack(recorder, self.images, self.labels, generator=random, **options)
        candidates = getattr(result, "restarts", None)
        return AuditedAttack(
            seed,
            result.images,
            result.images[None] if candidates is None else torch.cat([result.images[None], candidates]),
            getattr(result, "loss_history", None),
            frozenset(recorder.states),
        )

    @cached_property
    def robust(self) -> Tensor:
        """The accuracy under the audited attack, by example."""
        images = self.attack.images
        with self._apart("robust accuracy"):
            return self.accuracy(images)


Check = Callable[[AuditedModel], Finding]


def clearly_above(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether `first` exceeds `second` on average by more than `tolerance` and chance, paired by example."""
    gap = (first - second).double()
    noise = gap.std().item() / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    return gap.mean().item() > max(tolerance, 2.5 * noise)


def mean(values: Tensor) -> float:
    return round(values.double().mean().item(), 4)


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
