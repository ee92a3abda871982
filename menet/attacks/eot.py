"""Loss and input gradient in expectation over the model's randomness (EOT, Athalye et al. 2018).

Every attack that uses gradients takes them from here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from menet.attacks.base import Task
from menet.attacks.kinds import Images, Losses
from menet.attacks.losses import Loss
from menet.attacks.query import Queries
from menet.errors import AttackError, ConfigurationError

ROWS = 512
"""Images in one forward pass unless told otherwise."""
CACHED = 2**18
"""Numbers in the images of one pass of several draws on a CPU: larger passes leave its cache and are slower."""


@dataclass(frozen=True)
class ExpectedLoss:
    """The mean of `loss` over `draws` independent calls of the model, and its gradient by the images.

    The draws of a batch share forward passes of at most `rows` images, so memory does not grow with `draws`; on a
    CPU of fewer, where that is faster.
    Only the gradient by the images is computed: the parameters' `grad` is neither read nor written.
    """

    model: Queries
    loss: Loss
    labels: Tensor
    targets: Tensor | None = None
    draws: int = 1
    rows: int = ROWS

    def __post_init__(self) -> None:
        for name in ("draws", "rows"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    @classmethod
    def of(cls, task: Task, loss: Loss, draws: int, rows: int) -> "ExpectedLoss":
        """The expected loss of the task's model on the task's classes."""
        return cls(task.model, loss, task.labels, task.targets, draws, rows)

    def gradient(self, images: Images) -> tuple[Losses, Images]:
        """Mean losses, and the gradient of each with respect to its image."""
        if self.draws == 1 and len(images) <= self.rows:
            return self._gradient_of(images, slice(None), 1)
        total, slope = images.new_zeros(len(images)), torch.zeros_like(images)
        for block, draws in self._passes(images):
            losses, part = self._gradient_of(images[block], block, draws)
            total[block] += losses
            slope[block] += part
        return total, slope

    def value(self, images: Images) -> Losses:
        """Mean losses alone, without the cost of a gradient."""
        total = images.new_zeros(len(images))
        with torch.no_grad():
            for block, draws in self._passes(images):
                losses = self._losses(_repeated(images[block], draws), block, draws)
                total[block] += _over_draws(losses, draws)
        return total / self.draws

    def _gradient_of(self, images: Tensor, block: slice, draws: int) -> tuple[Tensor, Tensor]:
        leaf = _repeated(images.detach(), draws).requires_grad_()
        with torch.enable_grad():
            losses = self._losses(leaf, block, draws) / self.draws
            if not losses.requires_grad:
                raise AttackError(
                    "the model's logits do not depend on its images in a way that can be differentiated; "
                    "use a score or decision attack (spsa, square, boundary)"
                )
            (slope,) = torch.autograd.grad(losses.sum(), leaf)
        return _over_draws(losses.detach(), draws), _over_draws(slope, draws)

    def _losses(self, rows: Tensor, block: slice, draws: int) -> Tensor:
        logits = self.model(rows, block, draws)
        targets = None if self.targets is None else self.targets[block].repeat(draws)
        return self.loss(logits, self.labels[block].repeat(draws), targets)

    def _passes(self, images: Tensor) -> Iterator[tuple[slice, int]]:
        # As many draws as fit in one forward pass; examples are split only when one draw does not fit.
        fit = min(self.rows, CACHED // max(1, images[:1].numel())) if images.device.type == "cpu" else self.rows
        for start in range(0, len(images), self.rows):
            block = slice(start, min(start + self.rows, len(images)))
            together = max(1, fit // (block.stop - block.start))
            for done in range(0, self.draws, together):
                yield block, min(together, self.draws - done)


def _repeated(images: Tensor, draws: int) -> Tensor:
    return images if draws == 1 else images.repeat(draws, 1, 1, 1)


def _over_draws(values: Tensor, draws: int) -> Tensor:
    return values if draws == 1 else values.unflatten(0, (draws, -1)).sum(0)
