"""SPSA (Uesato et al. 2018): ascent along gradients estimated from scores alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet.attacks.ascent import StepRule, ascend
from menet.attacks.base import Attack, AttackResult, Images, Losses, Task, wide
from menet.attacks.eot import MAX_BATCH
from menet.attacks.losses import MARGIN, Loss
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SPSA(Attack):
    """Adam on finite differences of the loss along random sign vectors, taken in opposite pairs.

    The settings are Uesato et al.'s; `samples` = 2048 is the paper's batch size. Every sample is a fresh draw of
    a random model, so that the estimate is in expectation over its randomness. Samples are clipped to the pixel
    range: a black box accepts only images.
    """

    title: ClassVar[str] = "SPSA"

    threat: ThreatModel = CIFAR10
    steps: int = 100
    samples: int = 2048
    """Queries per gradient estimate, half of them opposite to the other half."""
    delta: float = 0.01
    learning_rate: float = 0.01
    loss: Loss = MARGIN
    stop: float | None = None
    """Stop an example once its mean loss over the samples exceeds this. For the margin loss on a deterministic
    model 0 is right and saves most of the work; leave it None for a random model."""
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        if self.samples < 2 or self.samples % 2:
            raise ConfigurationError(f"expected an even number of samples >= 2, got {self.samples}")
        if self.max_batch < 2:
            raise ConfigurationError(f"expected max_batch >= 2, got {self.max_batch}")
        for name in ("steps", "delta", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"expected {name} > 0, got {getattr(self, name)}")

    def run(self, task: Task) -> AttackResult:
        oracle = FiniteDifferences(self, task)
        rule = _AdamStep(self, task.images, oracle)
        ascent = ascend(
            oracle, task.images, rule, steps=self.steps, keep="best", evaluate_last=True, title=self.title
        )
        return task.result(ascent.images, loss_history=ascent.loss_history if task.loss_history else None)


class FiniteDifferences:
    """Mean losses over the samples, and estimated gradients; a finished example keeps its last loss."""

    def __init__(self, settings: SPSA, task: Task) -> None:
        self.settings, self.task = settings, task
        self.losses = task.images.new_full((len(task.images),), -torch.inf)
        self.finished = torch.zeros(len(task.images), dtype=torch.bool, device=task.images.device)

    def gradient(self, images: Images) -> tuple[Losses, Images]:
        gradient = torch.zeros_like(images)
        pending = (~self.finished).nonzero().squeeze(1)
        losses = self.losses.clone()
        at_once = max(1, self.settings.max_batch // self.settings.samples)
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
        pairs, together = settings.samples // 2, max(1, settings.max_batch // (2 * len(images)))
        total, gradient = images.new_zeros(len(images)), torch.zeros_like(images)
        for done in range(0, pairs, together):
            count = min(together, pairs - done)
            signs = _signs((count, *images.shape), self.task.generator, images)
            pair = torch.stack([images + settings.delta * signs, images - settings.delta * signs])
            batch = pair.clamp_(threat.low, threat.high).flatten(0, 2)
            logits = self.task.model(batch, examples, draws=2 * count)
            targets = self.task.targets
            scores = settings.loss(
                logits,
                self.task.labels[examples].repeat(2 * count),
                None if targets is None else targets[examples].repeat(2 * count),
            ).view(2, count, -1)
            total += scores.sum((0, 1))
            gradient += torch.einsum("pb,pbchw->bchw", scores[0] - scores[1], signs)
        return total / settings.samples, gradient / (2 * settings.delta * pairs)


class _AdamStep(StepRule):
    def __init__(self, settings: SPSA, origin: Tensor, oracle: FiniteDifferences) -> None:
        self.settings, self.origin, self.oracle = settings, origin, oracle
        self.mean, self.square = torch.zeros_like(origin), torch.zeros_like(origin)
        self.steps = 0

    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        update = self.settings.learning_rate * mean / (square.sqrt() + 1e-8)
        moved = self.settings.threat.project(images + update, self.origin)
        return torch.where(wide(self.oracle.finished), images, moved)


def _signs(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    bits = torch.randint(0, 2, shape, generator=generator, device=generator.device, dtype=torch.int8)
    return bits.to(like.device, like.dtype).mul_(2).sub_(1)
