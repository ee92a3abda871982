"""Projected gradient descent (Madry et al. 2018), the attack most others are a variant of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from menet.attacks.ascent import Ascent, FixedStep, Keep, Objective, Rule, ascend
from menet.attacks.base import Attack, Task
from menet.attacks.eot import ROWS, ExpectedLoss
from menet.attacks.losses import CROSS_ENTROPY, Loss
from menet.attacks.result import AttackResult
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Steps along the gradient's sign (its direction, for l2), each projected back into the threat model.

    On a ME-Net whose gradient is "bpda" this is the paper's BPDA attack; on one whose gradient is "exact" the
    same with true gradients; with `eot` > 1 each step follows the gradient in expectation over that many
    masks.
    """

    threat: ThreatModel = CIFAR10
    steps: int = 40
    step_size: float | None = None
    """Length of a step, in pixels of the [0,1] scale; 2.5 · epsilon / steps if not given. The paper: 2/255,
    and 0.01 for MNIST."""
    loss: Loss = CROSS_ENTROPY
    random_start: bool = True
    restarts: int = 1
    keep: Keep = "best"
    """Return the iterate with the highest mean loss, or the last one."""
    eot: int = 1
    """Independent draws of the model's randomness behind each gradient."""
    rows: int = ROWS
    """Most images in one forward pass."""

    def __post_init__(self) -> None:
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.step_size is not None and not self.step_size > 0:
            raise ConfigurationError(f"step_size is {self.step_size}; it must be above 0")
        if self.restarts > 1 and not self.random_start:
            raise ConfigurationError(f"restarts is {self.restarts} with random_start off: all would be the same")

    def objective(self, task: Task) -> Objective:
        """What is raised; a variant of the attack may change the gradient here."""
        return ExpectedLoss.of(task, self.loss, self.eot, self.rows)

    def rule(self, task: Task) -> Rule:
        """How a step is taken."""
        size = 2.5 * self.threat.epsilon / self.steps if self.step_size is None else self.step_size
        return FixedStep(self.threat, task.images, size)

    def run(self, task: Task) -> AttackResult:
        objective = self.objective(task)
        ascents = [self._ascend(task, objective) for _ in range(self.restarts)]
        images, winner = _highest(ascents)
        trace = torch.stack([ascent.trace for ascent in ascents])
        return AttackResult(
            images=images,
            queries=task.model.counts,
            trace=trace[winner, :, torch.arange(len(winner))].T if task.trace else None,
            restarts=torch.stack([ascent.images for ascent in ascents]) if self.restarts > 1 else None,
        )

    def _ascend(self, task: Task, objective: Objective) -> Ascent:
        start = task.images
        if self.random_start:
            start = self.threat.random_start(start, task.generator)
        return ascend(
            objective,
            start,
            self.rule(task),
            steps=self.steps,
            keep=self.keep,
            evaluate_last=task.trace or self.restarts > 1,
            name=type(self).__name__,
        )


def _highest(ascents: list[Ascent]) -> tuple[Tensor, Tensor]:
    first = ascents[0].images
    if len(ascents) == 1:
        return first, torch.zeros(len(first), dtype=torch.int64, device=first.device)
    losses = torch.stack([ascent.losses for ascent in ascents if ascent.losses is not None])
    winner = losses.argmax(0)
    images = torch.stack([ascent.images for ascent in ascents])
    return images[winner, torch.arange(len(winner), device=winner.device)], winner
