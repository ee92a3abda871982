"""The one loop over an attack's steps: FGSM, PGD, CW, APGD, SPSA and the adaptive attacks all run in it."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from menet.attacks.kinds import Images, Losses
from menet.attacks.threat import ThreatModel
from menet.progress import track

Keep = Literal["best", "last"]

SHOW_PROGRESS_FROM = 50
"""Shorter attacks run inside training loops, where a bar of their own would only flicker."""


@runtime_checkable
class Objective(Protocol):
    """What is raised: losses, and their gradients or an estimate of them."""

    def gradient(self, images: Images) -> tuple[Losses, Images]: ...

    def value(self, images: Images) -> Losses: ...


@runtime_checkable
class Rule(Protocol):
    """Where to go from `images`, given the gradient and the losses there. May remember earlier steps."""

    def __call__(self, images: Images, gradient: Images, losses: Losses) -> Images: ...


@dataclass(frozen=True)
class FixedStep:
    """A step of one size along the steepest direction of the norm, brought back into the threat model."""

    threat: ThreatModel
    origin: Tensor
    size: float

    def __call__(self, images: Images, gradient: Images, losses: Losses) -> Images:
        moved = torch.add(images, self.threat.direction(gradient), alpha=self.size)
        return self.threat.project(moved, self.origin)


@dataclass(frozen=True)
class Ascent:
    """Where an ascent ended: images, their mean losses if those were evaluated, and all losses on the way."""

    images: Float[Tensor, "b c h w"]
    losses: Float[Tensor, " b"] | None
    trace: Float[Tensor, "steps b"]


def ascend(
    objective: Objective, start: Images, rule: Rule, *, steps: int, keep: Keep, evaluate_last: bool, name: str
) -> Ascent:
    """Take `steps` steps from `start`, and return the iterate with the highest mean loss, or the last.

    The last iterate has no loss until the model is called once more: done for `keep="best"`, or if asked.
    """
    images = best = start
    best_losses = start.new_full((len(start),), -torch.inf)
    losses: Tensor | None = None
    trace = []

    def note(losses: Tensor) -> None:
        nonlocal best, best_losses
        trace.append(losses)
        if keep == "best":
            higher = losses > best_losses
            best = torch.where(higher.view(-1, 1, 1, 1), images, best)
            best_losses = torch.where(higher, losses, best_losses)

    for _ in track(range(steps), name) if steps >= SHOW_PROGRESS_FROM else range(steps):
        losses, gradient = objective.gradient(images)
        note(losses)
        images = rule(images, gradient, losses)
    losses = None
    if keep == "best" or evaluate_last:
        losses = objective.value(images)
        note(losses)
    path = torch.stack(trace)
    return Ascent(best, best_losses, path) if keep == "best" else Ascent(images, losses, path)
