"""Auto-PGD (Croce and Hein 2020): PGD with momentum that chooses its own step sizes."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from menet.attacks.ascent import StepRule
from menet.attacks.base import Images, Losses, Task, wide
from menet.attacks.pgd import PGD
from menet.attacks.threat import ThreatModel
from menet.errors import ConfigurationError

THRESHOLD = 0.75
"""The publication's ρ."""


@dataclass(frozen=True, kw_only=True)
class APGD(PGD):
    """PGD that halves an example's step size, and returns to its best iterate, when the loss stops rising.

    Unlike the reference implementation it compares iterates by the mean loss over all `eot` draws, not by the
    last draw's, and returns the iterate of highest mean loss whether or not one draw was fooled.

    Whether the loss rose is mostly chance for a random model, and steps halved by chance stop an attack early:
    there the steps are `PGD`'s unless `threshold` is given, as they are under l0.
    """

    title: ClassVar[str] = "APGD"

    steps: int = 100
    threshold: float | None = None
    """Halve the step when at most this fraction of the steps since the last check raised the loss (ρ); 0.75 for a
    deterministic model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None:
            raise ConfigurationError(f"expected no step_size, got {self.step_size}: APGD adapts its own")

    def resolved(self, random: bool) -> Self:
        published = self.threshold is not None or not random
        settled = replace(self, keep=self.keep or "best") if published else self
        return super(APGD, settled).resolved(random)

    def step_rule(self, task: Task) -> StepRule:
        if self.threat.norm == "l0" or (self.threshold is None and task.random):
            return self.steps_within(self.threat, task.images, task.random)
        return AdaptiveStep(self.threat, task.images, self.steps, self.threshold or THRESHOLD)


class AdaptiveStep(StepRule):
    """APGD's step; the symbols are those of the publication's Algorithm 1."""

    MOMENTUM = 0.75  # (α)

    def __init__(self, threat: ThreatModel, origin: Tensor, steps: int, threshold: float) -> None:
        self.threat, self.origin, self.threshold = threat, origin, threshold
        self.period, self.least_period = max(int(0.22 * steps), 1), max(int(0.06 * steps), 1)
        self.period_decrease = max(int(0.03 * steps), 1)
        self.size = origin.new_full((len(origin), 1, 1, 1), 2 * threat.reach(origin))  # (η)
        self.rises = origin.new_zeros(len(origin))
        self.since_check = 0
        self.first = True

    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        if self.first:
            self.before = images
            self.best, self.best_gradient, self.best_losses = images, gradient, losses
            self.best_at_check = losses
            self.halved = torch.ones_like(losses, dtype=torch.bool)
        else:
            images, gradient = self._review(images, gradient, losses)
        self.last_losses = losses
        inertia = 1.0 if self.first else self.MOMENTUM
        plain = self.threat.project(images + self.size * self.threat.direction(gradient), self.origin)
        moved = images + inertia * (plain - images) + (1 - inertia) * (images - self.before)
        self.before, self.first = images, False
        return self.threat.project(moved, self.origin)

    def _review(self, images: Tensor, gradient: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        self.rises += losses > self.last_losses
        higher = losses > self.best_losses
        self.best = torch.where(wide(higher), images, self.best)
        self.best_gradient = torch.where(wide(higher), gradient, self.best_gradient)
        self.best_losses = torch.where(higher, losses, self.best_losses)
        self.since_check += 1
        if self.since_check < self.period:
            return images, gradient
        oscillates = self.rises <= self.threshold * self.period
        stuck = ~self.halved & (self.best_at_check >= self.best_losses)
        self.halved = oscillates | stuck
        self.best_at_check = self.best_losses
        self.size = torch.where(wide(self.halved), self.size / 2, self.size)
        self.period = max(self.period - self.period_decrease, self.least_period)
        self.since_check, self.rises = 0, torch.zeros_like(self.rises)
        return (
            torch.where(wide(self.halved), self.best, images),
            torch.where(wide(self.halved), self.best_gradient, gradient),
        )
