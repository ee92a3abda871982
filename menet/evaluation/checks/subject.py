"""What an audit looks at, and what its checks share."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from menet import seeding
from menet.attacks import PGD, Attack, ThreatModel
from menet.attacks.eot import ROWS
from menet.attacks.kinds import Model
from menet.errors import ConfigurationError
from menet.evaluation.scoring import Outcome, score
from menet.seeding import reseed

Status = Literal["pass", "warn", "fail"]

Scorer = Callable[[Any, Tensor, Tensor, int, int], Outcome]
"""A way to score: (model, images, labels, masks, seed of the attack) → answers. Its masks should be fresh."""


@dataclass(frozen=True)
class Finding:
    """What a check found: its verdict, the numbers behind it, and one sentence of what they mean."""

    status: Status
    meaning: str
    numbers: dict[str, Any] = field(default_factory=dict)
    name: str = ""


def score_fresh(model: Any, images: Tensor, labels: Tensor, masks: int, seed: int) -> Outcome:
    """The project's own way to score: on masks that have nothing to do with those of the attack."""
    reseed(model, seeding.evaluation_seed(seed, "scoring"))
    return score(model, images, labels, masks)


@dataclass(frozen=True)
class AuditSettings:
    """What is audited, and how much work that may take."""

    threat: ThreatModel = field(default_factory=ThreatModel)
    attack: Any = None
    """The attack that the reported numbers come from; PGD with `steps` and `eot` if not given. Anything that is
    called like one will do."""
    scorer: Scorer = score_fresh
    """The way in which the reported numbers are scored."""
    steps: int = 40
    eot: int = 20
    step_sweep: tuple[int, ...] = (1, 5, 10, 20, 40, 100)
    eot_sweep: tuple[int, ...] = (1, 10, 20, 40)
    epsilon_sweep: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """Multiples of epsilon; the largest change that images allow comes after them."""
    masks: int = 50
    """Fresh masks behind each accuracy."""
    calls: int = 1000
    """Calls of the black-box attack."""
    tolerance: float = 0.02
    """Differences of accuracy below this are not spoken of."""
    rows: int = ROWS

    def __post_init__(self) -> None:
        for name in ("steps", "eot", "masks", "calls", "rows"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    def quick(self) -> "AuditSettings":
        """The same with about a tenth of the work: enough to see faults, too little to publish."""
        return replace(
            self,
            steps=min(self.steps, 20),
            eot=min(self.eot, 10),
            step_sweep=(1, 5, 20),
            eot_sweep=(1, 5, 10, 20),
            epsilon_sweep=(0.0, 1.0, 4.0),
            masks=min(self.masks, 20),
            calls=min(self.calls, 150),
        )


class Attempt(NamedTuple):
    """What the audited attack did."""

    seed: int
    images: Tensor
    candidates: Tensor
    trace: Tensor | None
    drawn: frozenset[bytes]
    """Fingerprints of the randomness that the model used meanwhile."""


class Watched:
    """A model that notes, at every call, where its randomness stands."""

    def __init__(self, model: Any) -> None:
        self._model, self.drawn = model, set[bytes]()

    def __call__(self, images: Tensor) -> Tensor:
        own = getattr(self._model, "generator", None)
        state = own.get_state() if isinstance(own, torch.Generator) else torch.get_rng_state()
        self.drawn.add(hashlib.sha256(state.cpu().numpy().tobytes()).digest())
        return self._model(images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass(frozen=True)
class Subject:
    """A model, examples and settings; what several checks need is computed once."""

    model: Any
    images: Float[Tensor, "b c h w"]
    labels: Tensor
    settings: AuditSettings
    generator: torch.Generator

    def seed(self) -> int:
        """A seed that nothing else of the audit has."""
        return int(torch.randint(2**62, (), generator=self.generator))

    @cached_property
    def random(self) -> bool:
        """Whether the model answers the same images differently from call to call."""
        with torch.no_grad():
            return not alike(self.model(self.images), self.model(self.images))

    @cached_property
    def classes(self) -> int:
        with torch.no_grad():
            return int(self.model(self.images[:1]).shape[1])

    @property
    def masks(self) -> int:
        return self.settings.masks if self.random else 1

    @property
    def eot(self) -> int:
        return self.settings.eot if self.random else 1

    def pgd(self, **changes: Any) -> PGD:
        """PGD with the settings of the audit and some changes."""
        settings = self.settings
        usual = {"threat": settings.threat, "steps": settings.steps, "eot": self.eot, "rows": settings.rows}
        return PGD(**{**usual, **changes})

    def survival(self, images: Tensor) -> Float[Tensor, " b"]:
        """For each example, the share of fresh masks under which it is right."""
        reseed(self.model, self.seed())
        return (
            (score(self.model, images, self.labels, self.masks, self.settings.rows).ranks == 0).double().mean(0)
        )

    def attacked(self, attack: Attack, model: Model | None = None) -> Tensor:
        """What `attack` makes of the images, on `model` if given."""
        chosen = self.model if model is None else model
        reseed(chosen, self.seed())
        random = torch.Generator().manual_seed(self.seed())
        return attack(chosen, self.images, self.labels, generator=random).images

    @cached_property
    def clean(self) -> Tensor:
        """The survival of the images as they are."""
        return self.survival(self.images)

    @cached_property
    def attempt(self) -> Attempt:
        """The audited attack, run once."""
        attack = self.pgd() if self.settings.attack is None else self.settings.attack
        seed, watched = self.seed(), Watched(self.model)
        reseed(self.model, seed)
        options: dict[str, Any] = {"trace": True} if isinstance(attack, Attack) else {}
        random = torch.Generator().manual_seed(self.seed())
        result = attack(watched, self.images, self.labels, generator=random, **options)
        candidates = getattr(result, "restarts", None)
        return Attempt(
            seed,
            result.images,
            result.images[None] if candidates is None else torch.cat([result.images[None], candidates]),
            getattr(result, "trace", None),
            frozenset(watched.drawn),
        )

    @cached_property
    def robust(self) -> Tensor:
        """The survival of what the audited attack made."""
        return self.survival(self.attempt.images)


Check = Callable[[Subject], Finding]


def alike(first: Tensor, second: Tensor) -> bool:
    """Whether two answers are one but for rounding."""
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def clearly_above(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether the mean of `first` exceeds that of `second` by more than `tolerance` and chance, by example."""
    gap = (first - second).double()
    noise = gap.std().item() / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    return gap.mean().item() > max(tolerance, 2.5 * noise)


def mean(values: Tensor) -> float:
    return round(values.double().mean().item(), 4)
