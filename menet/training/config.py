"""All that decides what a training run computes, in one frozen dataclass of plain values."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from torch import nn

import menet.baselines  # noqa: F401 - registers the defenses that a configuration can name
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.models import NETWORKS
from menet.preprocessed import describe, rebuild

Objective = Literal["standard", "adversarial", "trades"]
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["step", "one-cycle"]
Precision = Literal["auto", "float32", "bfloat16"]
Norm = Literal["linf", "l2"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What is trained, on what, and how; two runs of equal configurations end in equal weights.

    Images are on [0, 1], and so are `epsilon` and `step_size`. A field that cannot work is refused here, before
    any work starts.
    """

    recipe: str = "own"
    """A name for people; it changes nothing."""
    dataset: str = "digits"
    model: str = "lenet"
    defense: dict[str, Any] = field(default_factory=dict)
    """`describe(module)` of a preprocessing defense, where what is left out has its default; empty for none."""

    objective: Objective = "standard"
    norm: Norm = "linf"
    epsilon: float = 0.3
    steps: int = 10
    """Steps of PGD for each batch; the attack starts at a random point of the ball."""
    step_size: float = 0.075
    eot: int = 1
    """Masks behind each of the attack's gradients."""
    beta: float = 6.0
    """Weight of the robust term of TRADES."""

    epochs: int = 10
    batch: int = 128
    """Images in one step over all processes; an epoch's last images that do not fill one are left out of it."""
    optimizer: Optimizer = "sgd"
    rate: float = 0.05
    """The highest learning rate."""
    schedule: Schedule = "one-cycle"
    milestones: tuple[int, ...] = ()
    """Epochs after which a step schedule divides the rate by ten."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    augmentation: bool = False
    """Pad by 4, crop at random, mirror at random."""

    prepared: str | None = None
    """Folder of a prepared set (`menet prepare`) to take estimates from, in place of fresh masks."""
    limit: int | None = None
    """Train on so many images, chosen at random; all if None."""
    validation: int = 0
    """Images held out of the training set, by which the best epoch is chosen. With none it is the last epoch."""
    seed: int = 0
    precision: Precision = "auto"
    """`auto` is bfloat16 where the processor computes in it, else float32."""
    channels_last: bool = True

    def __post_init__(self) -> None:
        for name, accepted in (
            ("objective", get_args(Objective)),
            ("optimizer", get_args(Optimizer)),
            ("schedule", get_args(Schedule)),
            ("precision", get_args(Precision)),
            ("norm", get_args(Norm)),
            ("model", tuple(NETWORKS)),
        ):
            if getattr(self, name) not in accepted:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; accepted are {', '.join(accepted)}")
        for name, least in (
            ("epochs", 1),
            ("batch", 1),
            ("steps", 1),
            ("eot", 1),
            ("validation", 0),
            ("seed", 0),
        ):
            _whole(name, getattr(self, name), least)
        if self.limit is not None:
            _whole("limit", self.limit, 1)
        for name in ("rate", "step_size"):
            _number(name, getattr(self, name), above=True)
        for name in ("epsilon", "beta", "weight_decay", "momentum"):
            _number(name, getattr(self, name), above=False)
        if self.momentum >= 1:
            raise ConfigurationError(f"momentum is {self.momentum}; accepted are numbers from 0 to below 1")
        if self.schedule == "one-cycle" and self.milestones:
            raise ConfigurationError(f"milestones is {self.milestones}, which only the schedule 'step' has")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise ConfigurationError(f"milestones is {self.milestones}; accepted are rising epochs from 1")
        self._check_defense()

    def _check_defense(self) -> None:
        try:
            module = rebuild(nn.Identity(), self.defense)
        except (ConfigurationError, TypeError, ValueError) as error:
            raise ConfigurationError(f"defense is {self.defense!r:.200}: {error}") from error
        if self.prepared is not None:
            if not isinstance(module, MENet):
                raise ConfigurationError(
                    f"prepared is {self.prepared!r}, which only the defense 'me-net' can use"
                )
            if self.objective != "standard":
                raise ConfigurationError(
                    f"prepared is {self.prepared!r} with the objective {self.objective!r}; an attack needs fresh "
                    "masks, so accepted is 'standard'"
                )
        # What was left out is written down, so that a later change of a default does not change this run.
        object.__setattr__(self, "defense", describe(module))
        object.__setattr__(self, "milestones", tuple(self.milestones))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` takes them back."""
        return {**asdict(self), "milestones": list(self.milestones)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingConfig":
        """The configuration that `as_dict` wrote down."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigurationError(f"there is no setting {unknown[0]!r:.80}; accepted are {', '.join(known)}")
        try:
            return cls(**{**values, "milestones": tuple(values.get("milestones", ()))})
        except (TypeError, AttributeError) as error:
            raise ConfigurationError(f"the configuration has a value of a wrong kind: {error}") from error

    def difference(self, other: "TrainingConfig") -> str | None:
        """The first field by which two runs differ, with both values; None where there is none."""
        mine, theirs = self.as_dict(), other.as_dict()
        for name in mine:
            if name != "recipe" and mine[name] != theirs[name]:
                return f"{name} is {mine[name]!r:.200}, there it is {theirs[name]!r:.200}"
        return None


def me_net(
    estimator: str = "nuclear-norm", p: float | tuple[float, float] = (0.4, 0.6), **settings: Any
) -> dict[str, Any]:
    """The settings of ME-Net for `TrainingConfig.defense`; `estimator="mask-only"` is the ablation."""
    plain = list(p) if isinstance(p, tuple) else p
    return {"name": "me-net", "estimator": {"name": estimator}, "p": plain, **settings}


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} is {value!r}; accepted are whole numbers from {least}")


def _number(name: str, value: object, *, above: bool) -> None:
    fits = isinstance(value, int | float) and math.isfinite(value) and (value > 0 if above else value >= 0)
    if not fits:
        raise ConfigurationError(f"{name} is {value!r}; accepted are numbers {'above' if above else 'from'} 0")
