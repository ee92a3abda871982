"""Random search from scores alone, in expectation: the proposals of Square for linf, of Sparse-RS for l0.

Written here because the published implementations judge a proposal, and stop an example, by a single draw of the
model: on a random defense they keep what was lucky.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from menet.attacks.base import Attack, AttackResult, Images, Task, default_draws, wide
from menet.attacks.eot import MAX_BATCH, ExpectedLoss
from menet.attacks.losses import MARGIN, Loss
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError

RECHECK = 5
"""Proposals after which the current images are scored again: a mean that won by luck would block better ones."""


@dataclass(frozen=True, kw_only=True)
class RandomSearch(Attack):
    """Keeps a random change of the perturbation whenever it raises the mean loss over `draws` draws.

    For linf the changes are squares at ±epsilon that shrink over time (Square, Andriushchenko et al. 2020); for
    l2 squares of the length epsilon, after which the whole perturbation is projected. For l0 some perturbed
    pixels are exchanged for others, at extreme colors (Sparse-RS, Croce et al. 2022).
    """

    title: ClassVar[str] = "random search"

    threat: ThreatModel = CIFAR10
    proposals: int = 300
    """Changes tried per example."""
    initial_fraction: float = 0.3
    """Fraction of the pixels (linf) or of the perturbed pixels (l0) in the first changes."""
    loss: Loss = MARGIN
    draws: int | None = None
    """Draws of the model behind each score; if None, one for a deterministic model and ten for a random one."""
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        if self.proposals < 1:
            raise ConfigurationError(f"expected proposals >= 1, got {self.proposals}")
        if not 0 < self.initial_fraction <= 1:
            raise ConfigurationError(f"expected 0 < initial_fraction <= 1, got {self.initial_fraction}")

    def resolved(self, random: bool) -> Self:
        return replace(self, draws=self.draws or default_draws(random))

    def run(self, task: Task) -> AttackResult:
        score = ExpectedLoss.of(task, self.loss, task.draws(self.draws), self.max_batch)
        propose = self._exchange if self.threat.norm == "l0" else self._squares
        images = self._start(task)
        mean, scored = score.value(images), 1
        history = [mean]
        for number in range(self.proposals):
            if number % RECHECK == 0 and task.random:
                mean = (mean * scored + score.value(images)) / (scored + 1)
                scored += 1
            fraction = self.initial_fraction * _remaining(number / self.proposals)
            proposal = self.threat.project(propose(images, task, fraction), task.images)
            losses = score.value(proposal)
            better = losses > mean
            images, mean = torch.where(wide(better), proposal, images), torch.where(better, losses, mean)
            history.append(mean)
        return task.result(images, loss_history=torch.stack(history) if task.loss_history else None)

    def _start(self, task: Task) -> Images:
        origin, threat = task.images, self.threat
        if threat.norm == "l0":
            return threat.project(self._extreme(origin, task), origin)
        stripes = _signs((len(origin), origin.shape[1], 1, origin.shape[3]), task).to(origin)
        return threat.project(origin + self._height(origin, origin[0].numel()) * stripes, origin)

    def _height(self, origin: Images, entries: int) -> float:
        """The change of each of `entries` pixel values that spends the whole budget on them."""
        reach = self.threat.reach(origin)
        return reach if self.threat.norm == "linf" else float(reach / entries**0.5)

    def _squares(self, images: Images, task: Task, fraction: float) -> Images:
        b, c, h, w = images.shape
        side = max(1, min(h, w, round((fraction * h * w) ** 0.5)))
        top, left = (_integers(end - side + 1, (b,), task) for end in (h, w))
        rows, columns = torch.arange(h, device=images.device), torch.arange(w, device=images.device)
        inside = ((rows >= top[:, None]) & (rows < top[:, None] + side))[:, None, :, None] & (
            (columns >= left[:, None]) & (columns < left[:, None] + side)
        )[:, None, None, :]
        signs = _signs((b, c, 1, 1), task).to(images)
        return torch.where(inside, task.images + self._height(images, c * side * side) * signs, images)

    def _exchange(self, images: Images, task: Task, fraction: float) -> Images:
        count = max(1, round(fraction * min(self.threat.epsilon, images[0, 0].numel())))
        perturbed = (images != task.images).any(1).flatten(1)
        noise = torch.rand(perturbed.shape, generator=task.generator, device=task.generator.device).to(images)
        leaves = (noise + perturbed).topk(count, 1).indices
        enters = (noise - perturbed.to(noise)).topk(count, 1).indices
        shape = (len(images), 1, *images.shape[2:])
        out = torch.zeros_like(perturbed).scatter_(1, leaves, True) & perturbed
        new = torch.zeros_like(perturbed).scatter_(1, enters, True)
        # Where every pixel is perturbed already, the same pixels get new colors.
        kept = torch.where(out.view(shape), task.images, images)
        return torch.where(new.view(shape), self._extreme(images, task), kept)

    def _extreme(self, images: Images, task: Task) -> Images:
        colors = _signs((len(images), images.shape[1], *images.shape[2:]), task).to(images)
        return torch.where(colors > 0, self.threat.high, self.threat.low)


def _remaining(done: float) -> float:
    """Square's schedule of the changed fraction, for any number of proposals."""
    ends = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    return 0.5 ** (sum(done >= end for end in ends) - 1)


def _signs(shape: tuple[int, ...], task: Task) -> Tensor:
    return 2 * _integers(2, shape, task) - 1


def _integers(below: int, shape: tuple[int, ...], task: Task) -> Tensor:
    device = task.generator.device
    return torch.randint(below, shape, generator=task.generator, device=device).to(task.images.device)
