"""All that decides what a training run computes, in one frozen dataclass of plain values.

And what is built from it: a model, its averaged weights, an optimizer and a precision.
"""

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

import menet.baselines  # noqa: F401 - registers the defenses that a configuration can name
from menet import models
from menet.data import Dataset
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.linalg import has_bfloat16
from menet.models import NETWORKS
from menet.preprocessed import Preprocessed, classifier_channels, describe, rebuild
from menet.seeding import Stream, stream, stream_seed

Objective = Literal["standard", "adversarial", "n-fgsm", "trades"]
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["step", "one-cycle", "cosine"]
Precision = Literal["auto", "float32", "bfloat16"]
Norm = Literal["linf", "l2"]

WARM_UP = 0.3
"""Fraction of a one-cycle run in which the learning rate rises."""
START, END = 1 / 25, 1e-4
"""First and last learning rate of a one-cycle run, as fractions of the peak."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What is trained, on what, and how; two runs of equal configurations end in equal weights.

    Images are on [0, 1], and so are `epsilon` and `step_size`. Every field is validated here, before any work
    starts.
    """

    recipe: str = "own"
    """A name for people; it changes nothing."""
    dataset: str = "digits"
    model: str = "lenet"
    defense: dict[str, Any] = field(default_factory=dict)
    """`describe(module)` of a preprocessing defense; omitted settings have their defaults. Empty for none."""

    objective: Objective = "standard"
    norm: Norm = "linf"
    epsilon: float = 0.3
    steps: int = 10
    """PGD steps of the training attack, from a random start in the ε-ball; with `n-fgsm`, of validation alone."""
    step_size: float = 0.075
    eot: int = 1
    """Random draws of the defense averaged in each gradient of the attack."""
    noise: float = 2.0
    """Half-width of N-FGSM's noise in units of `epsilon`; 0 is FGSM, which overfits catastrophically."""
    epsilon_warm_up: float = 0.0
    """Fraction of the run in which the budget of the training attack rises linearly from 0 to `epsilon`."""
    beta: float = 6.0
    """Weight of the robust term of TRADES."""
    label_smoothing: float = 0.0
    """Probability that the targets of cross-entropy spread evenly over all classes; attacks use hard labels."""

    epochs: int = 10
    batch_size: int = 128
    """Images per step over all processes; the last images of an epoch that do not fill a batch are dropped."""
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.05
    """The peak learning rate."""
    schedule: Schedule = "one-cycle"
    """`step` divides by ten at the milestones, `one-cycle` rises and falls, `cosine` falls from the start."""
    milestones: tuple[int, ...] = ()
    """Epochs after which the step schedule divides the learning rate by ten."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip_gradient: float | None = None
    """Scale gradients down to this l2 norm over all weights; None leaves them as they are."""
    ema: float = 0.0
    """Decay of the exponential moving average of the weights, which is then what is validated, saved and tested.

    0 is no averaging. Early in a run the decay is lower, so that the initial weights are soon forgotten."""
    augmentation: bool = False
    """Pad by 4, random crop, random horizontal flip."""

    prepared: str | None = None
    """Folder of a prepared set (`menet prepare`), whose estimates replace fresh masks."""
    every_copy: bool = False
    """An epoch shows every estimate of a prepared set, as in the paper's Algorithm 1, not one for each image."""
    limit: int | None = None
    """Train on a stratified sample of this many images; all if None."""
    validation: int | float = 0
    """Training images held out to select the best epoch; below 1, the fraction of them. With 0 the last epoch is
    the best."""
    guard: int = 200
    """Steps between checks for catastrophic overfitting, on validation images; 0 for none.

    Standard training and runs without validation images are not checked."""
    seed: int = 0
    precision: Precision = "auto"
    """`auto` is bfloat16 on processors with bfloat16 instructions, else float32."""
    channels_last: bool = True

    def __post_init__(self) -> None:
        for name, choices in (
            ("objective", get_args(Objective)),
            ("optimizer", get_args(Optimizer)),
            ("schedule", get_args(Schedule)),
            ("precision", get_args(Precision)),
            ("norm", get_args(Norm)),
            ("model", tuple(NETWORKS)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"unknown {name} {getattr(self, name)!r:.80}; choose from {', '.join(choices)}"
                )
        for name, least in (
            ("epochs", 1),
            ("batch_size", 1),
            ("steps", 1),
            ("eot", 1),
            ("guard", 0),
            ("seed", 0),
        ):
            _check_integer(name, getattr(self, name), least)
        if self.limit is not None:
            _check_integer("limit", self.limit, 1)
        if not (isinstance(self.validation, float) and 0 <= self.validation < 1):
            _check_integer("validation", self.validation, 0, ", or a fraction below 1")
        for name in ("learning_rate", "step_size"):
            _check_number(name, getattr(self, name), positive=True)
        if self.clip_gradient is not None:
            _check_number("clip_gradient", self.clip_gradient, positive=True)
        for name in ("epsilon", "beta", "weight_decay", "momentum", "noise"):
            _check_number(name, getattr(self, name), positive=False)
        for name in ("label_smoothing", "ema", "epsilon_warm_up"):
            _check_number(name, getattr(self, name), positive=False)
        for name in ("momentum", "label_smoothing", "ema"):
            if getattr(self, name) >= 1:
                raise ConfigurationError(f"expected {name} < 1, got {getattr(self, name)}")
        if self.epsilon_warm_up > 1:
            raise ConfigurationError(f"expected epsilon_warm_up <= 1, got {self.epsilon_warm_up}")
        if self.schedule != "step" and self.milestones:
            raise ConfigurationError(
                f"expected no milestones with schedule {self.schedule!r}, got {self.milestones}; "
                "use schedule 'step', or leave them out"
            )
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise ConfigurationError(f"expected increasing milestones >= 1, got {self.milestones}")
        self._check_defense()

    def _check_defense(self) -> None:
        try:
            module = rebuild(nn.Identity(), self.defense)
        except (ConfigurationError, TypeError, ValueError) as error:
            raise ConfigurationError(f"invalid defense {self.defense!r:.200}: {error}") from error
        if self.prepared is not None:
            if not isinstance(module, MENet):
                raise ConfigurationError(
                    f"expected defense 'me-net' with prepared {self.prepared!r}, "
                    f"got {self.defense.get('name', 'none')!r}"
                )
            if self.objective != "standard":
                raise ConfigurationError(
                    f"expected objective 'standard' with prepared {self.prepared!r}, got {self.objective!r}: "
                    "an attack needs fresh random draws"
                )
        # Defaults are written out, so that a later change of a default does not change this run.
        object.__setattr__(self, "defense", describe(module))
        object.__setattr__(self, "milestones", tuple(self.milestones))

    def held_out(self, images: int) -> int:
        """How many of `images` training images are held out for validation."""
        if isinstance(self.validation, float):
            return max(1, round(self.validation * images)) if self.validation else 0
        return self.validation

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of `from_dict`."""
        return {**asdict(self), "milestones": list(self.milestones)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingConfig":
        """The configuration that `as_dict` wrote."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigurationError(f"unknown setting {unknown[0]!r:.80}; choose from {', '.join(known)}")
        try:
            return cls(**{**values, "milestones": tuple(values.get("milestones", ()))})
        except (TypeError, AttributeError) as error:
            raise ConfigurationError(f"a setting has the wrong type: {error}") from error

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """The first field in which another run's `as_dict()` differs, with both values; None if none does.

        It compares plain values and builds nothing: `saved` may come from a stranger's file.
        """
        for name, mine in self.as_dict().items():
            if name != "recipe" and (name not in saved or mine != saved[name]):
                return f"expected {name} {saved.get(name)!r:.200}, got {mine!r:.200}"
        return None


def learning_rate_at(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0 over the whole run.

    `step` divides by ten at each milestone (the paper's schedule); `one-cycle` rises to the configured learning
    rate and falls from there, both along a cosine (Smith 2018); `cosine` falls from the configured learning rate
    to zero (Loshchilov & Hutter 2017, without restarts).
    """
    if config.schedule == "step":
        passed = sum(step // steps_per_epoch >= milestone for milestone in config.milestones)
        return config.learning_rate * 0.1**passed
    done = step / max(1, config.epochs * steps_per_epoch - 1)
    if config.schedule == "cosine":
        return config.learning_rate * _cosine(1.0, 0.0, done)
    if done < WARM_UP:
        return config.learning_rate * _cosine(START, 1.0, done / WARM_UP)
    return config.learning_rate * _cosine(1.0, END, (done - WARM_UP) / (1 - WARM_UP))


def attack_strength_at(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The fraction of `epsilon` that the training attack of a step has, counted from 0 over the whole run."""
    rising = config.epsilon_warm_up * config.epochs * steps_per_epoch
    return 1.0 if step >= rising else (step + 1) / (rising + 1)


def me_net(
    estimator: str = "nuclear-norm", p: float | tuple[float, float] = (0.4, 0.6), **settings: Any
) -> dict[str, Any]:
    """The settings of ME-Net for `TrainingConfig.defense`; `estimator="mask-only"` is the ablation."""
    plain = list(p) if isinstance(p, tuple) else p
    return {"name": "me-net", "estimator": {"name": estimator}, "p": plain, **settings}


def _check_integer(name: str, value: object, least: int, otherwise: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"expected an integer {name} >= {least}{otherwise}, got {value!r}")


def _check_number(name: str, value: object, *, positive: bool) -> None:
    fits = isinstance(value, int | float) and math.isfinite(value) and (value > 0 if positive else value >= 0)
    if not fits:
        raise ConfigurationError(f"expected a finite {name} {'> 0' if positive else '>= 0'}, got {value!r}")


def _cosine(first: float, last: float, fraction: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * fraction)) / 2


def build_model(
    config: TrainingConfig,
    dataset: Dataset,
    worker: Worker | None = None,
    *,
    chosen: Tensor | None = None,
    fitted: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
) -> nn.Module:
    """The network for a dataset's images behind the configured defense; all randomness follows from the seed.

    A defense that is fitted to images is fitted to those at `chosen` (all if None), unless `fitted` gives the
    settings of one whose state is loaded afterwards. Where fitting takes long it resumes from `checkpoint`.
    """
    worker = Worker() if worker is None else worker
    channels = classifier_channels(dataset.images.shape[1], config.defense)
    weights = stream(config.seed, Stream.WEIGHTS)
    network = models.build(config.model, dataset, channels=channels, generator=weights)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = rebuild(network, config.defense if fitted is None else fitted).to(worker.device)
    if isinstance(model, Preprocessed):
        if fitted is None:
            images = dataset.images if chosen is None else _Subset(dataset.images, chosen)
            fit_defense(model, images, config.seed, checkpoint)
        model.reseed(stream_seed(config.seed, Stream.MASKS))
        model.shard = (worker.rank, worker.world)
    return model


def fit_defense(model: Preprocessed, images: Any, seed: int, checkpoint: Path | None = None) -> None:
    """Fit a defense to training images; where that takes long it resumes from `checkpoint`."""
    resumes = checkpoint is not None and "checkpoint" in inspect.signature(model.fit).parameters
    model.fit(images, stream(seed, Stream.FIT), **({"checkpoint": checkpoint} if resumes else {}))


@dataclass(frozen=True)
class _Subset:
    """Some of a dataset's images, read when they are indexed."""

    images: Any
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Tensor) -> Any:
        return self.images[self.chosen[index]]


def build_optimizer(config: TrainingConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all trainable weights; the loop sets its learning rate at each step."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(weights, config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        weights, config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )


def averaged_copy(config: TrainingConfig, model: nn.Module) -> nn.Module | None:
    """A copy of `model` to hold the moving average of its weights; None without averaging."""
    if not config.ema:
        return None
    return copy.deepcopy(model).requires_grad_(False)


def update_average(averaged: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Move the averaged weights towards those of `model`, after training step `step` (from 1).

    Batch-norm statistics are averaged with the weights. Recomputing them would take another pass over the data,
    under attack where training is adversarial; the average follows the weights at no cost, and is the same
    whenever a run is interrupted. The decay is min(decay, (1 + step) / (10 + step)): an average over the whole
    run so far while that is shorter than the decay's own horizon.
    """
    decay = min(decay, (1 + step) / (10 + step))
    with torch.no_grad():
        ours, theirs = averaged.state_dict(), model.state_dict()
        floating = [name for name, value in ours.items() if value.is_floating_point()]
        torch._foreach_lerp_([ours[name] for name in floating], [theirs[name] for name in floating], 1 - decay)
        for name in ours.keys() - set(floating):
            ours[name].copy_(theirs[name])


def number_type(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype for `precision` on `device`.

    `auto` is bfloat16 only where the processor has instructions for it: a CPU without them emulates it, which
    is slower than float32.
    """
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which layers compute in `dtype`; weights and estimators stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
