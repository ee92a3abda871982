"""What lets attacks of other libraries run here: a model they accept, and a random stream of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from menet.attacks.base import Task
from menet.attacks.query import Queries
from menet.attacks.threat import ThreatModel
from menet.errors import AttackError, ConfigurationError
from menet.progress import Reporter, reporting

NORMS = {"linf": "Linf", "l2": "L2"}
"""pyautoattack's names."""


class Bridge(nn.Module):
    """The task's model as the `nn.Module` that other libraries ask for.

    They call `backward`, which would write into the parameters' gradients, and `to` or `eval`, which would
    change the model. Here the model is no submodule, and a gradient goes to the images alone. Progress is in
    calls.
    """

    def __init__(self, task: Task, progress: Reporter) -> None:
        super().__init__()
        self._queries, self._type, self._progress = task.model, task.images.dtype, progress
        self.training = False

    def forward(self, images: Tensor) -> Tensor:
        self._progress.advance()
        rows = images.to(self._type)
        if torch.is_grad_enabled() and images.requires_grad:
            logits = _ImageGradient.apply(rows, self._queries)
        else:
            with torch.no_grad():
                # A copy, since pyautoattack writes into the logits it is given.
                logits = self._queries(rows).clone()
        return logits.to(images.dtype)


class _ImageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, queries: Queries) -> Tensor:
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            logits = queries(leaf)
        if not logits.requires_grad:
            raise AttackError("the model's logits cannot be differentiated; use a score or decision attack")
        ctx.graph = leaf, logits
        return logits.detach().clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        leaf, logits = ctx.graph
        # Kept for FAB, which asks for one gradient per class.
        (gradient,) = torch.autograd.grad(logits, leaf, slopes[0], retain_graph=True)
        return gradient, None


@contextmanager
def bridged(task: Task, name: str) -> Iterator[tuple[Bridge, int]]:
    """A bridge and a seed, inside a block whose use of torch's global generator leaves no trace outside.

    foolbox and pyautoattack draw from the global generator, and pyautoattack reseeds it; both take their seed
    from the task's generator here, so the attack repeats with it.
    """
    seed = int(torch.randint(2**31, (), generator=task.generator, device=task.generator.device))
    device = task.images.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        reporting(f"{name} (calls)") as progress,
    ):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield Bridge(task, progress), seed


def require_determinism(task: Task, name: str) -> Tensor:
    """Predictions for the images, or an error when two calls of the model do not agree."""
    with torch.no_grad():
        first, second = task.model(task.images), task.model(task.images)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise AttackError(
            f"{name} needs a model that answers the same image alike, and two calls differ by up to "
            f"{float((first - second).abs().max()):.3g}: freeze its masks, or give the vote over many"
        )
    return first.argmax(1)


def require_unit_range(threat: ThreatModel, library: str) -> None:
    """Refuse a range of pixels that the library underneath does not know."""
    if not (threat.low == 0 and threat.high == 1):
        raise ConfigurationError(
            f"the range of pixels is {threat.low:g} to {threat.high:g}; {library} accepts 0 to 1 only"
        )
