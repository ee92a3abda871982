"""The one loop over an attack's steps: FGSM, PGD, CW, APGD, SPSA and the adaptive attacks all run in it.

A loss oracle says how high the loss is and where it rises, a step rule where to go next. To step in another way
(momentum, schedules, averaged gradients, another choice of the iterate) write a `StepRule` and return it from
`PGD.step_rule`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from menet.attacks.base import Images, Losses, wide
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
