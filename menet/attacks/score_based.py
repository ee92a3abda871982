"""Score-based attacks, which see logits and no gradients: SPSA, random and coordinate search, and Square.

Random search is written here because the published implementations judge a proposal, and stop an example, by a
single draw of the model: on a random defense they keep what was lucky.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from menet.attacks.ascent import StepRule, ascend
from menet.attacks.base import Attack, AttackResult, Images, Losses, Task, default_draws, wide
from menet.attacks.external import NORMS, bridged, require_determinism, require_unit_range
from menet.attacks.losses import MARGIN, MAX_BATCH, ExpectedLoss, Loss
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError, require
from menet.progress import track

RECHECK = 5
"""Proposals after which a random search scores its current images again: a mean that won by luck would block
better ones."""


@dataclass(frozen=True, kw_only=True)
class SPSA(Attack):
    """Adam on finite differences of the loss along random sign vectors, in opposite pairs (Uesato et al. 2018).

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
        stripes = _random_signs((len(origin), origin.shape[1], 1, origin.shape[3]), task).to(origin)
        return threat.project(origin + self._height(origin, origin[0].numel()) * stripes, origin)

    def _height(self, origin: Images, entries: int) -> float:
        """The perturbation of each of `entries` pixel values that spends the whole budget on them."""
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
        signs = _random_signs((b, c, 1, 1), task).to(images)
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
        colors = _random_signs((len(images), images.shape[1], *images.shape[2:]), task).to(images)
        return torch.where(colors > 0, self.threat.high, self.threat.low)


def _remaining(done: float) -> float:
    """Square's schedule of the changed fraction, for any number of proposals."""
    ends = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    return 0.5 ** (sum(done >= end for end in ends) - 1)


def _random_signs(shape: tuple[int, ...], task: Task) -> Tensor:
    return 2 * _integers(2, shape, task) - 1


def _integers(below: int, shape: tuple[int, ...], task: Task) -> Tensor:
    device = task.generator.device
    return torch.randint(below, shape, generator=task.generator, device=device).to(task.images.device)


@dataclass(frozen=True, kw_only=True)
class CoordinateSearch(Attack):
    """Greedy search over single values, each at either end of its interval; for models that round pixels.

    A defense that rounds has no gradient, and few values that the budget lets it round otherwise. The search
    finds these by trying each alone. Then it makes the best single move, again and again, and where none helps
    the best pair (cf. Narodytska and Kasiviswanathan 2017; Moon et al. 2019 move blocks). It draws nothing at
    random, and is for deterministic models only. One image fills a batch with its neighbors.
    """

    title: ClassVar[str] = "coordinate search"

    threat: ThreatModel = CIFAR10
    max_queries: int = 10_000
    """Queries per example, at most; the first pass takes two for each value of an image."""
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        for name in ("max_queries", "max_batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {getattr(self, name)}")

    @torch.no_grad()
    def run(self, task: Task) -> AttackResult:
        images = task.images.clone()
        predicted = require_determinism(task, self.title)
        standing = predicted == task.labels if task.targets is None else predicted != task.targets
        for example in track(standing.nonzero().flatten().tolist(), self.title):
            images[example] = _Neighborhood(self, task, example).search()
        return task.result(images)


class _Neighborhood:
    """One image, and the moves from it: positions in the flattened image, each with another value."""

    def __init__(self, settings: CoordinateSearch, task: Task, example: int) -> None:
        self.settings, self.task = settings, task
        self.example = torch.tensor([example], device=task.images.device)
        self.origin = self.current = task.images[self.example]
        self.left = settings.max_queries
        nothing = torch.zeros((1, 1), dtype=torch.int64, device=task.images.device)
        losses, self.logits = self._try(nothing, self.origin.flatten()[nothing])
        self.loss = float(losses)
        # The same image in another batch has other last digits.
        self.least = float(torch.finfo(self.logits.dtype).eps ** 0.5 * self.logits.abs().max())
        self.positions, self.values = self._moves()

    def search(self) -> Tensor:
        """The image after the best moves, as soon as it is misclassified, no move helps, or queries are spent."""
        while self.loss <= 0 and self.left > 0:
            there = self.values != self.current.flatten()[self.positions]
            positions, values = self.positions[there], self.values[there]
            groups = torch.arange(len(positions), device=positions.device)[:, None]
            losses, _ = self._try(positions[groups], values[groups])
            if not (losses > self.loss + self.least).any():
                # Pairs of the best moves, as many as there are queries left for.
                fitting = int((1 + (1 + 8 * self.left) ** 0.5) / 2)
                best = losses.argsort(descending=True)[:fitting]
                groups = best[torch.combinations(torch.arange(len(best), device=best.device))]
                losses, _ = self._try(positions[groups], values[groups])
            if not (losses > self.loss + self.least).any():
                break
            chosen = groups[losses.argmax()][None]
            self.current, self.loss = self._moved(positions[chosen], values[chosen]), float(losses.max())
        return self.current[0]

    def _moves(self) -> tuple[Tensor, Tensor]:
        """Both ends of every value that changes a logit when it alone is moved.

        Where pixels are rounded most values cannot leave their interval. One that can leave it in one direction
        alone goes between there and its origin.
        """
        threat, origin = self.settings.threat, self.origin.flatten()
        reach, everywhere = threat.reach(self.origin), torch.arange(len(origin), device=origin.device)
        ends = torch.stack([origin - reach, origin + reach]).clamp(threat.low, threat.high)
        _, logits = self._try(everywhere.repeat(2)[:, None], ends.flatten()[:, None])
        changed = torch.zeros(ends.numel(), dtype=torch.bool, device=origin.device)
        changed[: len(logits)] = ((logits - self.logits).abs() > self.least).any(1)
        moved = changed.view_as(ends)
        alive = moved.any(0)
        return everywhere[alive].repeat(2), torch.where(moved, ends, origin)[:, alive].flatten()

    def _moved(self, positions: Tensor, values: Tensor) -> Images:
        """The current image after each of (n, k) moves, k of them at once, within the budget."""
        origin = self.origin.expand(len(positions), -1, -1, -1)
        images = self.current.flatten().expand(len(positions), -1).scatter(1, positions, values)
        return self.settings.threat.project(images.view(origin.shape), origin)

    def _try(self, positions: Tensor, values: Tensor) -> tuple[Losses, Tensor]:
        """Losses and logits after each of (n, k) moves, of as many as there are queries left."""
        task, count = self.task, min(self.left, len(positions))
        self.left -= count
        label, target = task.labels[self.example], None if task.targets is None else task.targets[self.example]
        losses, answers = [self.origin.new_zeros(0)], [self.origin.new_zeros(0, 1)]
        for first in range(0, count, self.settings.max_batch):
            part = slice(first, min(count, first + self.settings.max_batch))
            images = self._moved(positions[part], values[part])
            logits = task.model(images, self.example, draws=len(images))
            targets = None if target is None else target.expand(len(images))
            # The margin, whose sign says whether the search is done.
            losses.append(MARGIN(logits, label.expand(len(images)), targets))
            answers.append(logits)
        return torch.cat(losses), torch.cat(answers[1:] or answers)


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Random search over squares that keeps what raises the margin (Andriushchenko et al. 2020), by pyautoattack.

    Returns the image of highest margin seen, also where the attack did not succeed, so that a random model can
    be scored on fresh draws. An example is finished at its first misclassified draw.
    """

    title: ClassVar[str] = "Square"

    threat: ThreatModel = CIFAR10
    max_queries: int = 5000
    """Queries per example, at most."""
    initial_fraction: float = 0.8
    """Fraction of the pixels in the first squares."""

    def __post_init__(self) -> None:
        if self.max_queries < 1:
            raise ConfigurationError(f"expected max_queries >= 1, got {self.max_queries}")
        require_unit_range(self.threat, "pyautoattack")
        self.threat.require("linf", "l2", by=self.title)

    def run(self, task: Task) -> AttackResult:
        library = require("pyautoattack.square", extra="external")
        with bridged(task, self.title) as (bridge, seed), torch.no_grad():
            square = library.SquareAttack(
                bridge,
                norm=NORMS[self.threat.norm],
                n_queries=self.max_queries,
                eps=self.threat.epsilon,
                p_init=self.initial_fraction,
                seed=seed,
                targeted=task.targets is not None,
                device=task.images.device,
            )
            images = task.images.float()
            square.init_hyperparam(images)
            queries, found = square.attack_single_run(
                images, task.labels if task.targets is None else task.targets
            )
        found = self.threat.project(found.to(task.images.dtype), task.images)
        return task.result(found, queries=queries.to(torch.int64))
