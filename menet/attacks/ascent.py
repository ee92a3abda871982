"""The one loop over an attack's steps: FGSM, PGD, CW, APGD, SPSA and the adaptive attacks all run in it.

A loss oracle says how high the loss is and where it rises, a step rule where to go next. To step in another way
(momentum, schedules, averaged gradients, another choice of the iterate) write a `StepRule` and return it from
`PGD.step_rule`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from menet.attacks.base import RANDOM_DRAWS, Images, Losses, wide
from menet.attacks.threat import ThreatModel
from menet.progress import track

Keep = Literal["best", "last"]

SHOW_PROGRESS_FROM = 50
"""Shorter attacks run inside training loops, where a bar of their own would only flicker."""


@runtime_checkable
class LossOracle(Protocol):
    """The loss that an attack maximizes: its value per example, and its gradient or an estimate of it."""

    def gradient(self, images: Images) -> tuple[Losses, Images]: ...

    def value(self, images: Images) -> Losses: ...


class StepRule(ABC):
    """How an attack steps. One object serves one ascent, so it may keep momentum, step sizes or a history."""

    @abstractmethod
    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        """The next iterate, inside the threat model, given loss and gradient at `images`."""

    def select(self, last: Images) -> Images | None:
        """The images to return, `last` being the final iterate; None leaves the choice to `keep`."""
        return None


@dataclass(frozen=True)
class FixedStep(StepRule):
    """A step of fixed size along the direction of steepest ascent, projected into the threat model."""

    threat: ThreatModel
    origin: Tensor
    size: float

    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        moved = torch.add(images, self.threat.direction(gradient), alpha=self.size)
        return self.threat.project(moved, self.origin)


class MomentumStep(StepRule):
    """A step along accumulated gradients whose size falls to zero as a cosine; the last iterate is returned.

    For random models. A gradient over a few draws is noisy: accumulating averages it over the draws of earlier
    steps too. Large steps at first cross the budget, small ones at the end settle in spite of the noise. The loss
    of an iterate is as noisy, so that keeping the highest would keep the luckiest; hence the last.
    `benchmarks/stepping.py` compares it with other ways of stepping at equal passes.

    A direction averages 1 / (1 - momentum) gradients. The fewer `draws` each of them has, the longer it
    remembers: until `WINDOW` draws are behind a direction, over a fifth of the steps at most.
    """

    MOMENTUM = 0.75
    """At least."""
    WINDOW = 40

    def __init__(self, threat: ThreatModel, origin: Tensor, steps: int, draws: int = RANDOM_DRAWS) -> None:
        self.threat, self.origin, self.steps = threat, origin, steps
        self.momentum = max(self.MOMENTUM, 1 - max(draws / self.WINDOW, 5 / steps))
        self.first_size = threat.reach(origin) / 2
        self.accumulated = torch.zeros_like(origin)
        self.taken = 0

    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        # Each gradient counts by its direction: losses of different iterates differ in scale.
        size = gradient.abs().flatten(1).mean(1).clamp_min(torch.finfo(gradient.dtype).tiny)
        self.accumulated = self.momentum * self.accumulated + gradient / wide(size)
        step_size = self.first_size * (1 + math.cos(math.pi * self.taken / self.steps)) / 2
        self.taken += 1
        moved = torch.add(images, self.threat.direction(self.accumulated), alpha=step_size)
        return self.threat.project(moved, self.origin)

    def select(self, last: Images) -> Images:
        return last


class SparseStep(StepRule):
    """For l0: the pixels of highest gain at extreme colors, by gradients accumulated over the steps.

    The gain of a pixel is what the linearized loss rises by when its channels go to the ends of their range.
    Small steps with projection would keep whichever pixels came first: they outweigh all others.
    """

    MOMENTUM = 0.9

    def __init__(self, threat: ThreatModel, origin: Tensor) -> None:
        self.threat, self.origin = threat, origin
        self.accumulated = torch.zeros_like(origin)

    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        self.accumulated = self.MOMENTUM * self.accumulated + self.threat.direction(gradient)
        extreme = torch.where(self.accumulated > 0, self.threat.high, self.threat.low)
        gain = (self.accumulated * (extreme - self.origin)).sum(1).flatten(1)
        allowed = min(int(self.threat.epsilon), gain.shape[1])
        chosen = torch.zeros_like(gain, dtype=torch.bool).scatter_(1, gain.topk(allowed, 1).indices, True)
        return torch.where(chosen.view(len(images), 1, *images.shape[2:]), extreme, self.origin)


@dataclass(frozen=True)
class Ascent:
    """Where an ascent ended: images, their mean losses if evaluated, and the losses of every step."""

    images: Float[Tensor, "b c h w"]
    losses: Float[Tensor, " b"] | None
    loss_history: Float[Tensor, "steps b"]


def ascend(
    oracle: LossOracle, start: Images, rule: StepRule, *, steps: int, keep: Keep, evaluate_last: bool, title: str
) -> Ascent:
    """Take `steps` steps from `start`, and return the rule's selection, the iterate of highest loss, or the last.

    The loss of what is returned takes another forward pass, except for an earlier iterate. It is taken for
    `keep="best"`, and if `evaluate_last`.
    """
    images = best = start
    best_losses = start.new_full((len(start),), -torch.inf)
    history = []

    def record(losses: Tensor) -> None:
        nonlocal best, best_losses
        history.append(losses)
        if keep == "best":
            higher = losses > best_losses
            best = torch.where(wide(higher), images, best)
            best_losses = torch.where(higher, losses, best_losses)

    for _ in track(range(steps), title) if steps >= SHOW_PROGRESS_FROM else range(steps):
        losses, gradient = oracle.gradient(images)
        record(losses)
        images = rule.step(images, gradient, losses)
    selected = rule.select(images)
    if selected is not None:
        images, keep = selected, "last"
    last_losses = None
    if keep == "best" or evaluate_last:
        last_losses = oracle.value(images)
        record(last_losses)
    path = torch.stack(history)
    return Ascent(best, best_losses, path) if keep == "best" else Ascent(images, last_losses, path)
