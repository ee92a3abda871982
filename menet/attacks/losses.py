"""Losses that attacks maximize, and their expectation over the model's randomness (EOT, Athalye et al. 2018).

A loss is one number per example, higher if it is worse for the classifier; with `targets`, if the model predicts
the target class instead. Every attack that uses gradients takes them from `ExpectedLoss`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from menet.attacks.base import Images, Losses, Queries, Task
from menet.errors import ConfigurationError, NotDifferentiable

MAX_BATCH = 512
"""Images in one forward pass, by default."""
CACHED = 2**18
"""Pixels in one forward pass over several draws on a CPU: larger passes leave its cache and are slower."""
_TINY = 1e-12


@runtime_checkable
class Loss(Protocol):
    """Maps logits (n,K), labels (n,) and, for targeted attacks, targets (n,) to losses (n,)."""

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy with the label, or minus the cross-entropy with the target."""

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return functional.cross_entropy(logits, labels, reduction="none")
        return -functional.cross_entropy(logits, targets, reduction="none")


@dataclass(frozen=True)
class Margin:
    """The best other logit minus the label's (Carlini and Wagner), capped at `confidence`.

    Positive if and only if the example is misclassified. Beyond the cap, the paper's κ, the gradient is zero.
    With targets: the target's logit minus the best other one.
    """

    confidence: float = math.inf

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
        chosen = labels if targets is None else targets
        own = _pick(logits, chosen)
        other = logits.scatter(1, chosen[:, None], -math.inf).amax(1)
        margin = other - own if targets is None else own - other
        return margin.clamp(max=self.confidence)


@dataclass(frozen=True)
class DLR:
    """Difference of logits ratio (Croce and Hein 2020): a margin that ignores shift and scale of the logits.

    Needs at least 3 classes, or 4 when targeted.
    """

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
        needed = 3 if targets is None else 4
        if logits.shape[1] < needed:
            raise ConfigurationError(
                f"expected a model of at least {needed} classes for the "
                f"{'' if targets is None else 'targeted '}DLR loss, got {logits.shape[1]}; use the margin loss"
            )
        top = logits.topk(needed, dim=1).values
        own = _pick(logits, labels)
        if targets is None:
            best_other = torch.where(own == top[:, 0], top[:, 1], top[:, 0])
            return (best_other - own) / (top[:, 0] - top[:, 2] + _TINY)
        spread = top[:, 0] - (top[:, 2] + top[:, 3]) / 2
        return (_pick(logits, targets) - own) / (spread + _TINY)


CROSS_ENTROPY = CrossEntropy()
MARGIN = Margin()
MARGIN_50 = Margin(confidence=50.0)

LOSSES: dict[str, type[CrossEntropy] | type[Margin] | type[DLR]] = {
    "cross-entropy": CrossEntropy,
    "margin": Margin,
    "dlr": DLR,
}


def build(name: str) -> Loss:
    """The loss of that name, with its default settings."""
    if name not in LOSSES:
        raise ConfigurationError(f"unknown loss {name!r}; choose from {', '.join(LOSSES)}")
    return LOSSES[name]()


def _pick(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


@dataclass(frozen=True)
class ExpectedLoss:
    """The mean of `loss` over `draws` independent calls of the model, and its gradient.

    Draws share forward passes of at most `max_batch` images (fewer on a CPU, where that is faster), so that
    memory does not grow with `draws`. Only the gradient with respect to the images is computed: the parameters'
    `grad` is neither read nor written. NaN components of a draw's gradient count as zero.
    """

    model: Queries
    loss: Loss
    labels: Tensor
    targets: Tensor | None = None
    draws: int = 1
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        for name in ("draws", "max_batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, task: Task, loss: Loss, draws: int, max_batch: int) -> "ExpectedLoss":
        """The expected loss of the task's model on the task's classes."""
        return cls(task.model, loss, task.labels, task.targets, draws, max_batch)

    def gradient(self, images: Images) -> tuple[Losses, Images]:
        """Mean losses, and the gradient of each with respect to its image."""
        if self.draws == 1 and len(images) <= self.max_batch:
            return self.gradient_of(images, slice(None))
        total, gradient = images.new_zeros(len(images)), torch.zeros_like(images)
        for block, draws in self._passes(images):
            losses, part = self.gradient_of(images[block], block, draws)
            total[block] += losses
            gradient[block] += part
        return total, gradient

    def value(self, images: Images) -> Losses:
        """Mean losses alone, without the cost of a gradient."""
        total = images.new_zeros(len(images))
        with torch.no_grad():
            for block, draws in self._passes(images):
                logits = self.model(_repeated(images[block], draws), block, draws)
                total[block] += _over_draws(self._losses(logits, block, draws), draws)
        return total / self.draws

    def gradient_of(self, images: Tensor, block: slice | Tensor, draws: int = 1) -> tuple[Tensor, Tensor]:
        """What some of the draws add to `gradient`, for the examples in `block` alone and in one pass."""
        leaf = _repeated(images.detach(), draws).requires_grad_()
        with torch.enable_grad():
            logits = self.model(leaf, block, draws)
            losses = self._losses(logits, block, draws) / self.draws
            gradient, at_logits = None, None
            if losses.requires_grad:
                gradient, at_logits = torch.autograd.grad(losses.sum(), (leaf, logits), allow_unused=True)
            if gradient is None or at_logits is None:
                raise NotDifferentiable
        gradient = self.model.checked_gradient(gradient, logits.detach(), at_logits, block, draws)
        return _over_draws(losses.detach(), draws), _over_draws(gradient, draws)

    def _losses(self, logits: Tensor, block: slice | Tensor, draws: int) -> Tensor:
        targets = None if self.targets is None else self.targets[block].repeat(draws)
        return self.loss(logits, self.labels[block].repeat(draws), targets)

    def _passes(self, images: Tensor) -> Iterator[tuple[slice, int]]:
        # As many draws as fit in one forward pass; examples are split only when one draw does not fit.
        fit = (
            min(self.max_batch, CACHED // max(1, images[:1].numel()))
            if images.device.type == "cpu"
            else self.max_batch
        )
        for start in range(0, len(images), self.max_batch):
            block = slice(start, min(start + self.max_batch, len(images)))
            together = max(1, fit // (block.stop - block.start))
            for done in range(0, self.draws, together):
                yield block, min(together, self.draws - done)


def _repeated(images: Tensor, draws: int) -> Tensor:
    return images if draws == 1 else images.repeat(draws, 1, 1, 1)


def _over_draws(values: Tensor, draws: int) -> Tensor:
    return values if draws == 1 else values.unflatten(0, (draws, -1)).sum(0)
