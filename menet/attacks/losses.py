"""Losses that attacks maximize: one number per example, higher is worse for the classifier.

With `targets`, a loss is high if the model predicts the target class instead.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from menet.errors import ConfigurationError


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


_TINY = 1e-12


def _pick(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)
