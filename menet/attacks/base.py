"""What every attack has in common: how it is called, what it refuses, and the check of what it returns."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet.attacks.kinds import Model
from menet.attacks.query import Queries
from menet.attacks.result import AttackResult, unchanged
from menet.attacks.threat import ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True)
class Task:
    """One call of an attack, after its arguments have been checked."""

    model: Queries
    images: Tensor
    labels: Tensor
    targets: Tensor | None
    random: torch.Generator | None
    trace: bool

    @property
    def generator(self) -> torch.Generator:
        """The caller's generator; attacks that draw at random ask for it here."""
        if self.random is None:
            raise ConfigurationError("generator is missing: this attack draws at random, pass a torch.Generator")
        return self.random

    def hand_to(
        self, attack: "Attack", model: Model | None = None, targets: Tensor | None = None
    ) -> AttackResult:
        """Call another attack on the same examples, on `model` if given."""
        return attack(
            self.model.model if model is None else model,
            self.images,
            self.labels,
            generator=self.random,
            targets=self.targets if targets is None else targets,
            trace=self.trace,
        )


class Attack(ABC):
    """An attack is a frozen object, called as `attack(model, images, labels, generator=…)`.

    `model` is any callable images → logits, used in the mode it is in; its mode, its parameters and their
    gradients stay as they are. `labels` are the true classes; with `targets` the attack seeks those classes
    instead of any wrong one. Whatever comes back lies in `threat`; with epsilon = 0 it is the input.
    """

    targetable: ClassVar[bool] = True
    minimum_norm: ClassVar[bool] = False

    @property
    @abstractmethod
    def threat(self) -> ThreatModel:
        """What the adversary may do."""

    @abstractmethod
    def run(self, task: Task) -> AttackResult:
        """The attack itself, on checked arguments; call the object instead."""

    def __call__(
        self,
        model: Model,
        images: Tensor,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
        targets: Tensor | None = None,
        trace: bool = False,
    ) -> AttackResult:
        check_images(images, self.threat)
        check_classes("labels", labels, images)
        name = type(self).__name__
        if targets is not None:
            check_classes("targets", targets, images)
            if not self.targetable:
                raise ConfigurationError(f"targets were given, but {name} has no targeted variant")
        if not (self.threat.bounded or self.minimum_norm):
            raise ConfigurationError(f"epsilon is {self.threat.epsilon}, but {name} needs a finite one")
        if self.threat.epsilon == 0 or len(images) == 0:
            return unchanged(images, failed=False)
        original = images.detach()
        result = self.run(
            Task(Queries(model, labels, targets), original, labels, targets, random=generator, trace=trace)
        )
        for candidate in (result.images, *(() if result.restarts is None else result.restarts)):
            self.threat.check(candidate, original)
        return result


def check_images(images: Tensor, threat: ThreatModel) -> None:
    """Refuse what is not a batch of images in the range of pixels, naming what is wrong."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ConfigurationError(
            f"images has shape {tuple(images.shape)} and type {images.dtype}; "
            "accepted are floating-point (B, C, H, W)"
        )
    inside = ((images >= threat.low) & (images <= threat.high)).flatten(1).all(1)
    if not inside.all():
        example = int((~inside).nonzero()[0])
        raise ConfigurationError(
            f"images has pixels from {float(images[example].min()):g} to {float(images[example].max()):g} at "
            f"example {example}; accepted are {threat.low:g} to {threat.high:g}"
        )


def check_classes(name: str, classes: Tensor, images: Tensor) -> None:
    """Refuse what is not one class number per image."""
    if classes.dtype != torch.int64 or classes.shape != images.shape[:1]:
        raise ConfigurationError(
            f"{name} has shape {tuple(classes.shape)} and type {classes.dtype}; "
            f"accepted are int64 of shape ({len(images)},)"
        )
    if classes.device != images.device:
        raise ConfigurationError(f"{name} is on {classes.device}, images on {images.device}; put both on one")
    if len(classes) and int(classes.min()) < 0:
        raise ConfigurationError(f"{name} has class {int(classes.min())}; accepted are 0 and more")
