"""Running attacks of other libraries: a model they accept, and a random stream of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from menet.attacks.base import Queries, Task, is_deterministic
from menet.attacks.threat import ThreatModel
from menet.errors import AttackError, ConfigurationError, NotDifferentiable
from menet.progress import Reporter, reporting

NORMS = {"linf": "Linf", "l2": "L2"}
"""pyautoattack's names."""


class Bridge(nn.Module):
    """The task's model as the `nn.Module` that other libraries expect.

    They call `backward`, which would write to the parameters' gradients, and `to` or `eval`, which would change
    the model. Here the model is not a submodule, and gradients reach only the images. Progress counts forward
    passes.
    """

    def __init__(self, task: Task, progress: Reporter) -> None:
        super().__init__()
        self._queries, self._type, self._progress = task.model, task.images.dtype, progress
        self.training = False

    def forward(self, images: Tensor) -> Tensor:
        self._progress.advance()
        batch = images.to(self._type)
        if torch.is_grad_enabled() and images.requires_grad:
            logits = _ImageGradient.apply(batch, self._queries)
        else:
            with torch.no_grad():
                # A copy, since pyautoattack writes to the logits it is given.
                logits = self._queries(batch).clone()
        return logits.to(images.dtype)


class _ImageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, queries: Queries) -> Tensor:
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            logits = queries(leaf)
        if not logits.requires_grad:
            raise NotDifferentiable
        ctx.graph, ctx.queries = (leaf, logits), queries
        return logits.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (leaf, logits), (at_logits,) = ctx.graph, gradients
        # The graph is kept for FAB, which takes one gradient per class.
        (gradient,) = torch.autograd.grad(logits, leaf, at_logits, retain_graph=True)
        return ctx.queries.checked_gradient(gradient, logits.detach(), at_logits), None


@contextmanager
def bridged(task: Task, title: str) -> Iterator[tuple[Bridge, int]]:
    """A bridge and a seed, for a block after which torch's global generator is as it was before.

    foolbox and pyautoattack draw from the global generator, and pyautoattack reseeds it. Here the seed comes from
    the task's generator, so that the attack is reproducible.
    """
    seed = int(torch.randint(2**31, (), generator=task.generator, device=task.generator.device))
    device = task.images.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        reporting(f"{title} (forward passes)") as progress,
    ):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield Bridge(task, progress), seed


def require_determinism(task: Task, title: str) -> Tensor:
    """Predictions for the images, or `AttackError` if two calls of the model disagree."""
    logits: list[Tensor] = []

    def recorded(images: Tensor) -> Tensor:
        logits.append(task.model(images))
        return logits[-1]

    if not is_deterministic(recorded, task.images):
        raise AttackError(
            f"{title} needs a deterministic model, and the logits of two calls differ by up to "
            f"{float((logits[0] - logits[1]).abs().max()):.3g}: fix the random draws of the defense, or attack "
            "its vote over many"
        )
    return logits[0].argmax(1)


def require_unit_range(threat: ThreatModel, library: str) -> None:
    """Raise `ConfigurationError` for a pixel range that the library does not support."""
    if not (threat.low == 0 and threat.high == 1):
        raise ConfigurationError(
            f"expected a pixel range of 0 to 1 for {library}, got {threat.low:g} to {threat.high:g}"
        )
