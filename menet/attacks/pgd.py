"""Projected gradient descent (Madry et al. 2018) and its variants: FGSM, CW's loss in a ball, Auto-PGD, and PGD
within the smallest budget that fools."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from menet.attacks.ascent import Ascent, FixedStep, Keep, LossOracle, MomentumStep, SparseStep, StepRule, ascend
from menet.attacks.base import Attack, AttackResult, Images, Losses, Task, default_draws, wide
from menet.attacks.losses import CROSS_ENTROPY, MARGIN, MARGIN_50, MAX_BATCH, ExpectedLoss, Loss
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError
from menet.progress import track

THRESHOLD = 0.75
"""Auto-PGD's ρ, as published."""
STEPS = 40
"""Unless given."""
RANDOM_STEPS = 200, 2
"""Steps and draws on a random model, if neither is given: as many passes as 40 steps of ten draws, and a stronger
attack, since each step remembers the draws before it (`benchmarks/stepping.py`)."""


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Steps along the gradient's sign (its direction, for l2), each projected into the threat model.

    On a ME-Net whose gradient is "bpda" this is the paper's BPDA attack, on one whose gradient is "exact" the
    same with true gradients. With `eot` > 1 each step follows the mean gradient over that many draws of the
    model's randomness. Variants override `oracle` (the loss and its gradient) or `step_rule` (how to step).

    What is left at None follows the model. A deterministic one is attacked as Madry et al. do: 40 constant steps
    of 2.5 · epsilon / steps on cross-entropy, and the iterate of highest loss. A random one by momentum and
    falling steps (`MomentumStep`) on the margin: 200 steps of two draws, or where one of `steps` and `eot` is
    given, the other of 40 steps of ten draws. A given `step_size` means constant steps on cross-entropy for both.
    Under l0 each step chooses its pixels anew (`SparseStep`), by cross-entropy.
    """

    title: ClassVar[str] = "PGD"

    threat: ThreatModel = CIFAR10
    steps: int | None = None
    step_size: float | None = None
    """Length of constant steps, in pixels of the [0,1] scale. The paper: 2/255, and 0.01 for MNIST."""
    loss: Loss | None = None
    random_start: bool = True
    restarts: int = 1
    keep: Keep | None = None
    """Return the iterate of highest mean loss, or the last one, as for a random model."""
    eot: int | None = None
    """Draws of the model's randomness that each gradient is averaged over."""
    max_batch: int = MAX_BATCH
    """Images in one forward pass, at most."""

    def __post_init__(self) -> None:
        for name in ("steps", "restarts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {value}")
        if self.step_size is not None and not self.step_size > 0:
            raise ConfigurationError(f"expected step_size > 0, got {self.step_size}")
        if self.restarts > 1 and not self.random_start:
            raise ConfigurationError(
                f"expected restarts = 1 without random_start, got {self.restarts}: all would be the same"
            )

    def oracle(self, task: Task) -> LossOracle:
        """The loss to maximize and its gradient."""
        # Whether the model is random costs two calls, so it is asked only where something follows it.
        loss = self.loss or self.loss_on(self.step_size is None and task.random)
        return ExpectedLoss.of(task, loss, task.draws(self.eot), self.max_batch)

    def loss_on(self, random: bool) -> Loss:
        """The loss that suits a deterministic or a random model, unless one is given."""
        by_momentum = random and self.step_size is None and self.threat.norm != "l0"
        return self.loss or (MARGIN if by_momentum else CROSS_ENTROPY)

    def step_rule(self, task: Task) -> StepRule:
        """How to step; made anew for every restart."""
        return self.steps_within(self.threat, task.images, self.step_size is None and task.random)

    def steps_within(self, threat: ThreatModel, origin: Tensor, random: bool) -> StepRule:
        """The steps that suit a deterministic or a random model, in the ball of `threat` around `origin`."""
        if self.step_size is not None:
            return FixedStep(threat, origin, self.step_size)
        if threat.norm == "l0":
            return SparseStep(threat, origin)
        steps, draws = self.steps_and_draws(random)
        if random:
            return MomentumStep(threat, origin, steps, draws)
        return FixedStep(threat, origin, 2.5 * threat.reach(origin) / steps)

    def steps_and_draws(self, random: bool) -> tuple[int, int]:
        """The steps to take, and the draws that each gradient is averaged over."""
        if random and self.steps is None and self.eot is None:
            return RANDOM_STEPS
        return self.steps or STEPS, self.eot or default_draws(random)

    def resolved(self, random: bool) -> Self:
        steps, draws = self.steps_and_draws(random)
        keep: Keep = self.keep or ("last" if random else "best")
        return replace(self, steps=steps, eot=draws, loss=self.loss_on(random), keep=keep)

    def run(self, task: Task) -> AttackResult:
        if self.steps is None:
            return self.resolved(task.random).run(task)
        oracle = self.oracle(task)
        ascents = [self._ascend(task, oracle) for _ in range(self.restarts)]
        images, winner = _highest(ascents)
        history = torch.stack([ascent.loss_history for ascent in ascents])
        return task.result(
            images,
            loss_history=history[winner, :, torch.arange(len(winner))].T if task.loss_history else None,
            restarts=torch.stack([ascent.images for ascent in ascents]) if self.restarts > 1 else None,
        )

    def _ascend(self, task: Task, oracle: LossOracle) -> Ascent:
        start = task.images
        if self.random_start:
            start = self.threat.random_start(start, task.generator)
        rule = self.step_rule(task)
        # On a random model the highest of noisy losses would be the luckiest iterate's.
        noisy = self.keep is None and isinstance(rule, FixedStep | SparseStep) and task.random
        keep: Keep = "last" if noisy else "best"
        return ascend(
            oracle,
            start,
            rule,
            steps=self.steps or STEPS,
            keep=self.keep or keep,
            evaluate_last=task.loss_history or self.restarts > 1,
            title=self.title,
        )


@dataclass(frozen=True, kw_only=True)
class CW(PGD):
    """PGD on Carlini and Wagner's margin loss, as Madry et al. and the paper's CW columns use it.

    The paper's κ = 20 and κ = 50 are `loss=Margin(20)` and `loss=Margin(50)`. Their original minimum-norm
    attack is `CWL2`.
    """

    title: ClassVar[str] = "CW (margin)"

    loss: Loss | None = MARGIN_50


@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """The fast gradient sign method (Goodfellow et al. 2015): one step of length epsilon, no random start."""

    title: ClassVar[str] = "FGSM"

    threat: ThreatModel = CIFAR10
    loss: Loss = CROSS_ENTROPY
    eot: int | None = None
    max_batch: int = MAX_BATCH

    def resolved(self, random: bool) -> Self:
        return replace(self, eot=self.eot or default_draws(random))

    def run(self, task: Task) -> AttackResult:
        one_step = PGD(
            threat=self.threat,
            steps=1,
            step_size=self.threat.reach(task.images),
            loss=self.loss,
            random_start=False,
            keep="last",
            eot=self.eot,
            max_batch=self.max_batch,
        )
        return one_step.run(task)


@dataclass(frozen=True, kw_only=True)
class SmallestPGD(Attack):
    """PGD within the smallest budget that fools the model, found by bisection for each image.

    It is what foolbox 1 does unless told otherwise, and with it the published evaluation of ME-Net by transfer: a
    run ends at its first misclassified iterate, and of all these the one closest to the image is returned. So the
    image is perturbed just enough for the attacked model and the draws at hand. Another model, or another draw of
    the same one, classifies most such images correctly whatever epsilon is: this attack is here to compare with
    such evaluations, and says nothing about robustness at epsilon.

    Where no budget up to epsilon fools the model, the image is the last iterate within epsilon; foolbox 1 goes on
    to larger ones.
    """

    title: ClassVar[str] = "PGD within the smallest budget"

    threat: ThreatModel = CIFAR10
    steps: int = 40
    step_size: float | None = None
    """At a budget of epsilon, a quarter of it unless given (the paper's ratio); it shrinks with the budget."""
    rounds: int = 10
    """Budgets that are tried: epsilon first, then by bisection."""
    loss: Loss = CROSS_ENTROPY
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        for name in ("steps", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.step_size is not None and not self.step_size > 0:
            raise ConfigurationError(f"expected step_size > 0, got {self.step_size}")
        self.threat.require("linf", "l2", by=self.title)

    def run(self, task: Task) -> AttackResult:
        origin, largest = task.images, self.threat.reach(task.images)
        every = torch.arange(len(origin), device=origin.device)
        wrong = torch.isin(every, self._fooled(task, origin, every))
        closest, distance = origin, torch.where(wrong, 0.0, torch.inf).to(origin.dtype)
        budget = origin.new_full((len(origin),), largest)
        too_small, enough = torch.zeros_like(budget), budget
        for _ in track(range(self.rounds), self.title):
            found, fooled = self._within(task, budget, (self.step_size or largest / 4) / largest, wrong)
            length = (found - origin).flatten(1).norm(dim=1)
            # Until something fools the model, what was tried last.
            better = torch.where(fooled, length < distance, distance.isinf())
            closest = torch.where(wide(better), found, closest)
            distance = torch.where(fooled & better, length, distance)
            enough = torch.where(fooled, budget, enough)
            too_small = torch.where(fooled, too_small, budget)
            budget = (too_small + enough) / 2
        return task.result(closest)

    def _within(self, task: Task, budgets: Tensor, ratio: float, wrong: Tensor) -> tuple[Tensor, Tensor]:
        """Each image's first iterate within its budget that fools the model, or else the last; which fool it."""
        oracle = ExpectedLoss.of(task, self.loss, 1, self.max_batch)
        images, fooled = task.images.clone(), wrong.clone()
        for _ in range(self.steps):
            if fooled.all():
                break
            for some in (~fooled).nonzero().flatten().split(self.max_batch):
                _, gradient = oracle.gradient_of(images[some], some)
                moved = images[some] + wide(ratio * budgets[some]) * self.threat.direction(gradient)
                images[some] = self.threat.project(moved, task.images[some], budgets[some])
                fooled[self._fooled(task, images, some)] = True
        return images, fooled

    def _fooled(self, task: Task, images: Tensor, examples: Tensor) -> Tensor:
        """Those of some examples that fool the model in one draw."""
        found = []
        with torch.no_grad():
            for some in examples.split(self.max_batch):
                predicted = task.model(images[some], some).argmax(1)
                aim = task.labels if task.targets is None else task.targets
                found.append(some[(predicted == aim[some]) == (task.targets is not None)])
        return torch.cat(found)


def _highest(ascents: list[Ascent]) -> tuple[Tensor, Tensor]:
    first = ascents[0].images
    if len(ascents) == 1:
        return first, torch.zeros(len(first), dtype=torch.int64, device=first.device)
    losses = torch.stack([ascent.losses for ascent in ascents if ascent.losses is not None])
    winner = losses.argmax(0)
    images = torch.stack([ascent.images for ascent in ascents])
    return images[winner, torch.arange(len(winner), device=winner.device)], winner


@dataclass(frozen=True, kw_only=True)
class APGD(PGD):
    """Auto-PGD (Croce and Hein 2020): PGD with momentum that chooses its own step sizes.

    It halves an example's step size, and returns to its best iterate, when the loss stops rising.

    Unlike the reference implementation it compares iterates by the mean loss over all `eot` draws, not by the
    last draw's, and returns the iterate of highest mean loss whether or not one draw was fooled.

    Whether the loss rose is mostly chance for a random model, and steps halved by chance stop an attack early:
    there the steps are `PGD`'s unless `threshold` is given, as they are under l0.
    """

    title: ClassVar[str] = "APGD"

    loss: Loss | None = CROSS_ENTROPY
    steps: int = 100
    threshold: float | None = None
    """Halve the step when at most this fraction of the steps since the last check raised the loss (ρ); 0.75 for a
    deterministic model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None:
            raise ConfigurationError(f"expected no step_size, got {self.step_size}: APGD adapts its own")

    def resolved(self, random: bool) -> Self:
        published = self.threshold is not None or not random
        settled = replace(self, keep=self.keep or "best") if published else self
        return super(APGD, settled).resolved(random)

    def step_rule(self, task: Task) -> StepRule:
        if self.threat.norm == "l0" or (self.threshold is None and task.random):
            return self.steps_within(self.threat, task.images, task.random)
        return AdaptiveStep(self.threat, task.images, self.steps, self.threshold or THRESHOLD)


class AdaptiveStep(StepRule):
    """APGD's step; the symbols are those of the publication's Algorithm 1."""

    MOMENTUM = 0.75  # (α)

    def __init__(self, threat: ThreatModel, origin: Tensor, steps: int, threshold: float) -> None:
        self.threat, self.origin, self.threshold = threat, origin, threshold
        self.period, self.least_period = max(int(0.22 * steps), 1), max(int(0.06 * steps), 1)
        self.period_decrease = max(int(0.03 * steps), 1)
        self.size = origin.new_full((len(origin), 1, 1, 1), 2 * threat.reach(origin))  # (η)
        self.rises = origin.new_zeros(len(origin))
        self.since_check = 0
        self.first = True

    def step(self, images: Images, gradient: Images, losses: Losses) -> Images:
        if self.first:
            self.before = images
            self.best, self.best_gradient, self.best_losses = images, gradient, losses
            self.best_at_check = losses
            self.halved = torch.ones_like(losses, dtype=torch.bool)
        else:
            images, gradient = self._review(images, gradient, losses)
        self.last_losses = losses
        inertia = 1.0 if self.first else self.MOMENTUM
        plain = self.threat.project(images + self.size * self.threat.direction(gradient), self.origin)
        moved = images + inertia * (plain - images) + (1 - inertia) * (images - self.before)
        self.before, self.first = images, False
        return self.threat.project(moved, self.origin)

    def _review(self, images: Tensor, gradient: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        self.rises += losses > self.last_losses
        higher = losses > self.best_losses
        self.best = torch.where(wide(higher), images, self.best)
        self.best_gradient = torch.where(wide(higher), gradient, self.best_gradient)
        self.best_losses = torch.where(higher, losses, self.best_losses)
        self.since_check += 1
        if self.since_check < self.period:
            return images, gradient
        oscillates = self.rises <= self.threshold * self.period
        stuck = ~self.halved & (self.best_at_check >= self.best_losses)
        self.halved = oscillates | stuck
        self.best_at_check = self.best_losses
        self.size = torch.where(wide(self.halved), self.size / 2, self.size)
        self.period = max(self.period - self.period_decrease, self.least_period)
        self.since_check, self.rises = 0, torch.zeros_like(self.rises)
        return (
            torch.where(wide(self.halved), self.best, images),
            torch.where(wide(self.halved), self.best_gradient, gradient),
        )
