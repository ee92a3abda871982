"""Attacks made of others: worst cases over attacks or target classes, and transfer from a surrogate."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from menet.attacks.base import Attack, AttackResult, Model, Task, default_draws
from menet.attacks.losses import DLR, MAX_BATCH, CrossEntropy, ExpectedLoss, Margin
from menet.attacks.pgd import APGD
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True)
class WorstCase(Attack):
    """Run every attack, and keep for each example the image with the highest margin.

    Candidates are compared by their mean margin over `draws` fresh draws of the model, not by the draws on which
    the attacks saw them succeed.
    """

    title: ClassVar[str] = "worst case"

    attacks: tuple[Attack, ...]
    draws: int | None = None
    """Draws that candidates are compared on; if None, one for a deterministic model and ten for a random one."""
    max_batch: int = MAX_BATCH

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.attacks or any(attack.threat != self.threat for attack in self.attacks):
            threats = ", ".join(str(attack.threat) for attack in self.attacks) or "none"
            raise ConfigurationError(f"expected one or more attacks with the same threat model, got {threats}")

    @property
    def threat(self) -> ThreatModel:
        return self.attacks[0].threat

    def resolved(self, random: bool) -> Self:
        attacks = tuple(attack.resolved(random) for attack in self.attacks)
        return replace(self, attacks=attacks, draws=self.draws or default_draws(random))

    def run(self, task: Task) -> AttackResult:
        results = [task.delegate(attack) for attack in self.attacks]
        return worst_case(task, results, task.draws(self.draws), self.max_batch)


@dataclass(frozen=True)
class MultiTargeted(Attack):
    """Run `attack` towards each of the likeliest wrong classes, and keep the image with the highest margin.

    With `APGD(loss=DLR())` inside this is the APGD-T of AutoAttack. To choose the classes yourself, call the
    attack with `targets=`.
    """

    title: ClassVar[str] = "multi-targeted"

    attack: Attack
    classes: int = 9
    """How many wrong classes to try; all of them if the model has fewer."""
    draws: int | None = None
    """Draws of the model's randomness behind the ranking of classes and the comparison of candidates; if None,
    one for a deterministic model and ten for a random one."""
    max_batch: int = MAX_BATCH

    targetable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise ConfigurationError(f"expected classes >= 1, got {self.classes}")

    @property
    def threat(self) -> ThreatModel:
        return self.attack.threat

    def resolved(self, random: bool) -> Self:
        return replace(self, attack=self.attack.resolved(random), draws=self.draws or default_draws(random))

    def run(self, task: Task) -> AttackResult:
        draws = task.draws(self.draws)
        with torch.no_grad():
            logits = torch.stack([task.model(task.images) for _ in range(draws)]).mean(0)
        wrong = logits.scatter(1, task.labels[:, None], -torch.inf)
        ranked = wrong.argsort(1, descending=True)[:, : min(self.classes, logits.shape[1] - 1)]
        results = [task.delegate(self.attack, targets=targets) for targets in ranked.unbind(1)]
        return worst_case(task, results, draws, self.max_batch)


def worst_case(task: Task, results: Sequence[AttackResult], draws: int, max_batch: int) -> AttackResult:
    """For each example, the image of `results` with the highest mean margin on the task's model."""
    candidates = torch.cat([result.candidates for result in results])
    margin = ExpectedLoss.of(task, Margin(), draws, max_batch)
    winner = torch.stack([margin.value(images) for images in candidates]).argmax(0)
    for result in results:
        task.model.count(result)
    return task.result(
        candidates[winner, torch.arange(len(winner), device=winner.device)],
        restarts=candidates,
        unusable_gradients=_in_all([result.unusable_gradients for result in results]),
    )


def _in_all(flags: Sequence[Tensor | None]) -> Tensor | None:
    known = [one for one in flags if one is not None]
    return torch.stack(known).all(0) if known else None


@dataclass(frozen=True, kw_only=True)
class AutoAttackRand(Attack):
    """APGD on cross-entropy and on DLR, each in expectation over `eot` draws, and the worst case of both.

    AutoAttack's "rand" version without its weakness, which is to judge success on a single draw and return the
    clean image where that one is classified correctly. Here candidates are compared by their mean margin over
    `eot` fresh draws.
    """

    title: ClassVar[str] = "AutoAttack (rand)"

    threat: ThreatModel = CIFAR10
    steps: int = 100
    eot: int = 20
    max_batch: int = MAX_BATCH

    def run(self, task: Task) -> AttackResult:
        both = tuple(
            APGD(threat=self.threat, steps=self.steps, loss=loss, eot=self.eot, max_batch=self.max_batch)
            for loss in (CrossEntropy(), DLR())
        )
        return WorstCase(both, draws=self.eot, max_batch=self.max_batch).run(task)


@dataclass(frozen=True)
class Transfer(Attack):
    """Run `attack` on the surrogate `source`; the attacked model is never queried, so `queries` are zero.

    `docs/reproduce.md` says which source the paper's black-box and gray-box settings have. A source that is an
    `nn.Module` is moved to the device of the images.
    """

    title: ClassVar[str] = "transfer"

    attack: Attack
    source: Model = field(repr=False)

    # Left to the attack itself, which is called with all its checks.
    minimum_norm: ClassVar[bool] = True

    @property
    def threat(self) -> ThreatModel:
        return self.attack.threat

    def resolved(self, random: bool) -> Self:
        return replace(self, attack=self.attack.resolved(random))

    def run(self, task: Task) -> AttackResult:
        if isinstance(self.source, nn.Module):
            self.source.to(task.images.device)
        return replace(
            task.delegate(self.attack, self.source), queries=task.model.counts, gradients=task.model.gradients
        )
