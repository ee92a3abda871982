"""SPSA (Uesato et al. 2018): ascent along gradients estimated from scores alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from menet.attacks.ascent import ascend
from menet.attacks.base import Attack, Task
from menet.attacks.eot import ROWS
from menet.attacks.kinds import Images, Losses
from menet.attacks.losses import MARGIN, Loss
from menet.attacks.result import AttackResult
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SPSA(Attack):
    """Adam on finite differences of the loss along random sign vectors, taken in opposite pairs.

    The settings are Uesato et al.'s; `samples` = 2048 is the paper's batch size. Each sample of a random
    model draws its randomness anew, so the estimate is in expectation over it. Samples are clipped to the
    range of pixels: a black box answers for images only.
    """

    threat: ThreatModel = CIFAR10
    steps: int = 100
    samples: int = 2048
    """Evaluations behind each gradient, half of them opposite to the other half."""
    delta: float = 0.01
    learning_rate: float = 0.01
    loss: Loss = MARGIN
    stop: float | None = None
    """Leave an example alone once its mean loss over the samples exceeds this; 0 is right for the margin loss
    on a deterministic model and saves most of the work, while a random model deserves every step."""
    rows: int = ROWS

    def __post_init__(self) -> None:
        if self.samples < 2 or self.samples % 2:
            raise ConfigurationError(f"samples is {self.samples}; it must be even and at least 2")
        if self.rows < 2:
            raise ConfigurationError(f"rows is {self.rows}; it must be 2 or more")
        for name in ("steps", "delta", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")

    def run(self, task: Task) -> AttackResult:
        objective = _FiniteDifferences(self, task)
        rule = _AdamStep(self, task.images, objective)
        ascent = ascend(
            objective, task.images, rule, steps=self.steps, keep="best", evaluate_last=True, name="SPSA"
        )
        return AttackResult(ascent.images, task.model.counts, trace=ascent.trace if task.trace else None)


class _FiniteDifferences:
    """Losses smoothed over the samples, and estimated gradients; a finished example keeps its last loss."""

    def __init__(self, settings: SPSA, task: Task) -> None:
        self.settings, self.task = settings, task
        self.losses = task.images.new_full((len(task.images),), -torch.inf)
        self.finished = torch.zeros(len(task.images), dtype=torch.bool, device=task.images.device)

    def gradient(self, images: Images) -> tuple[Losses, Images]:
        gradient = torch.zeros_like(images)
        pending = (~self.finished).nonzero().squeeze(1)
        losses = self.losses.clone()
        at_once = max(1, self.settings.rows // self.settings.samples)
        for first in range(0, len(pending), at_once):
            examples = pending[first : first + at_once]
            losses[examples], gradient[examples] = self._estimate(images[examples], examples)
        if self.settings.stop is not None:
            self.finished = self.finished | (losses > self.settings.stop)
        self.losses = losses
        return losses, gradient

    def value(self, images: Images) -> Losses:
        return self.gradient(images)[0]

    @torch.no_grad()
    def _estimate(self, images: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        settings, threat = self.settings, self.settings.threat
        pairs, together = settings.samples // 2, max(1, settings.rows // (2 * len(images)))
        total, slope = images.new_zeros(len(images)), torch.zeros_like(images)
        for done in range(0, pairs, together):
            count = min(together, pairs - done)
            signs = _signs((count, *images.shape), self.task.generator, images)
            pair = torch.stack([images + settings.delta * signs, images - settings.delta * signs])
            rows = pair.clamp_(threat.low, threat.high).flatten(0, 2)
            logits = self.task.model(rows, examples, draws=2 * count)
            targets = self.task.targets
            scores = settings.loss(
                logits,
                self.task.labels[examples].repeat(2 * count),
                None if targets is None else targets[examples].repeat(2 * count),
            ).view(2, count, -1)
            total += scores.sum((0, 1))
            slope += torch.einsum("pb,pbchw->bchw", scores[0] - scores[1], signs)
        return total / settings.samples, slope / (2 * settings.delta * pairs)


class _AdamStep:
    def __init__(self, settings: SPSA, origin: Tensor, objective: _FiniteDifferences) -> None:
        self.settings, self.origin, self.objective = settings, origin, objective
        self.mean, self.square = torch.zeros_like(origin), torch.zeros_like(origin)
        self.steps = 0

    def __call__(self, images: Images, gradient: Images, losses: Losses) -> Images:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        change = self.settings.learning_rate * mean / (square.sqrt() + 1e-8)
        moved = self.settings.threat.project(images + change, self.origin)
        return torch.where(self.objective.finished.view(-1, 1, 1, 1), images, moved)


def _signs(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    bits = torch.randint(0, 2, shape, generator=generator, device=generator.device, dtype=torch.int8)
    return bits.to(like.device, like.dtype).mul_(2).sub_(1)
