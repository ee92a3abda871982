"""The standard suite: one worst case over attacks, without parameters, for random preprocessing defenses.

It is to them what AutoAttack is to deterministic models. `docs/standard.md` describes it as a protocol that a
paper can cite.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from menet.attacks.base import Attack, AttackResult, Model, Queries, Task
from menet.attacks.ensemble import MultiTargeted
from menet.attacks.external import AutoAttack
from menet.attacks.losses import CROSS_ENTROPY, MARGIN, MAX_BATCH, ExpectedLoss
from menet.attacks.pgd import APGD, PGD
from menet.attacks.score_based import RandomSearch
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError, NotDifferentiable

Budget = Literal["quick", "standard", "thorough"]
PASSES: dict[str, int] = {"quick": 400, "standard": 2500, "thorough": 20000}
"""Gradient passes per example that withstands every attack."""
FIRST_PASSES, LEAST_PASSES = 1000, 100
"""Gradient passes of the first attack before others get any, and of any other."""
FIRST_SHARE = 0.7
"""Of the first attack in larger budgets."""
FEWEST_STEPS = 200
"""Of a gradient attack, before its gradients get a second draw each. Steps remember the gradients before them, so
that at few passes many noisy steps find more than a few exact ones; at many passes the noise is what is left."""
TRIAL_EXAMPLES, TRIAL_STEPS = 32, 20
"""Of the short attack that tells which way for gradients to pass the model is the stronger one."""
CLEAN = "none (clean image)"


class Member(NamedTuple):
    """One attack of the suite and the view of the model that it runs on."""

    name: str
    attack: Attack
    model: Model
    gradients: bool = True


@dataclass(frozen=True, kw_only=True)
class Standard(Attack):
    """The worst case over gradient, transfer and score-based attacks, all in expectation over the model's draws.

    A random model is attacked by PGD on the margin, on cross-entropy and towards the likeliest wrong classes,
    through exact gradients or BPDA, whichever finds more on a trial, and the other beside it; by a transfer from
    its own classifier; and by random search from scores. An example leaves once none of the selection draws
    classifies it correctly. Each example keeps the image with the fewest correct selection draws, which no member
    saw; scoring needs fresh ones again. Deterministic models get AutoAttack's standard suite, and APGD through
    each way for gradients to pass their preprocessing.

    `budget` is quick, standard, thorough, or the number of gradient passes per example. `queries` and `gradients`
    of the result are what was spent, surrogates included, and `members` names who found each image.
    """

    title: ClassVar[str] = "standard suite"

    threat: ThreatModel = CIFAR10
    budget: str | int = "standard"
    """One of `Budget`, or a number of gradient passes."""
    max_batch: int = MAX_BATCH
    gradients_only: bool = False
    """Leave out the attacks that take no gradient of the model: part of a suite, not to be reported as one."""
    version: int = field(default=5, init=False)
    """Changes whenever the same budget would find other images; results name it."""

    targetable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        named = isinstance(self.budget, str) and self.budget in PASSES
        numbered = isinstance(self.budget, int) and not isinstance(self.budget, bool) and self.budget >= 1
        if not (named or numbered):
            raise ConfigurationError(
                f"expected budget {', '.join(get_args(Budget))} or a number of gradient passes >= 1, "
                f"got {self.budget!r}"
            )

    @property
    def passes(self) -> int:
        """Gradient passes per example that withstands every attack."""
        return PASSES[self.budget] if isinstance(self.budget, str) else self.budget

    @property
    def draws(self) -> int:
        """Draws in each score, and at most in each gradient."""
        return 20 if self.passes >= 10_000 else min(10, self.passes)

    @property
    def selection_draws(self) -> int:
        """Fresh draws on which candidates are compared."""
        return 2 * self.draws

    def run(self, task: Task) -> AttackResult:
        if task.random:
            return self._worst_case(task, self._members(task), self.selection_draws)
        return self._worst_case(task, self._deterministic_members(task), 1)

    def _worst_case(self, task: Task, members: Iterator[Member], draws: int) -> AttackResult:
        best = _Selection(task, draws, self.max_batch)
        unusable: list[Tensor] = []
        for member in members:
            left = best.robust()
            if not len(left):
                break
            try:
                result = member.attack.attempt(
                    member.model, task.images[left], task.labels[left], generator=task.generator
                )
            except NotDifferentiable:
                unusable.append(torch.ones_like(task.labels, dtype=torch.bool))
                continue
            task.model.count(result, left)
            if member.gradients and result.unusable_gradients is not None:
                flags = torch.ones_like(task.labels, dtype=torch.bool)
                flags[left] = result.unusable_gradients
                unusable.append(flags)
            for images in result.candidates:
                best.consider(images, left, member.name)
        return task.result(
            best.images,
            members=tuple(best.members),
            unusable_gradients=torch.stack(unusable).all(0) & best.is_robust() if unusable else None,
        )

    def _members(self, task: Task) -> Iterator[Member]:
        views, spent = self._ordered_views(task)
        common: dict[str, Any] = {"threat": self.threat, "max_batch": self.max_batch}
        (name, model), *others = views.items()
        passes_of = _divided(self.passes - spent, others=len(others))

        def pgd(passes: int, **settings: Any) -> PGD:
            draws = max(1, min(self.draws, passes // FEWEST_STEPS))
            return PGD(steps=passes // draws, eot=draws, **common, **settings)

        yield Member(f"{name}, margin", pgd(passes_of["margin"], loss=MARGIN), model)
        if passes_of["cross-entropy"]:
            yield Member(f"{name}, cross-entropy", pgd(passes_of["cross-entropy"], loss=CROSS_ENTROPY), model)
        for other, view in others if passes_of["others"] else ():
            yield Member(f"{other}, margin", pgd(passes_of["others"] // len(others), loss=MARGIN), view)
        if passes_of["targeted"]:
            classes = min(9, passes_of["targeted"] // LEAST_PASSES)
            towards = pgd(passes_of["targeted"] // classes, loss=MARGIN)
            targeted = MultiTargeted(towards, classes=classes, draws=self.draws, max_batch=self.max_batch)
            yield Member(f"{name}, targeted margin", targeted, model)
        if self.gradients_only:
            return
        surrogate = own_classifier(task)
        if surrogate is not None:
            yield Member("transfer from its classifier", APGD(steps=50, loss=MARGIN, **common), surrogate, False)
        yield self._from_scores(task.model.model, self.passes // self.draws)

    def _ordered_views(self, task: Task) -> tuple[dict[str, Model], int]:
        """The ways for gradients to pass the model, the leading one first, and the passes it took to tell.

        Exact gradients lead unless a short attack through another way comes more than twice as far towards a
        wrong answer, by three standard errors over the examples: gradients may be exact and useless, such as
        those of a choice among neighbors, which are zero, or those of a long search, which are noise. How far is
        counted from a step in a random direction. Where both lead somewhere, exact gradients do better the longer
        an attack is.
        """
        views = gradient_views(task.model.model)
        if len(views) == 1:
            return views, 0
        steps, few = min(TRIAL_STEPS, max(1, self.passes // 20)), slice(0, TRIAL_EXAMPLES)
        images, labels = task.images[few], task.labels[few]
        attack = PGD(threat=self.threat, steps=steps, eot=1, loss=MARGIN, max_batch=self.max_batch)
        shortfall = ExpectedLoss(task.model, _shortfall, labels, draws=self.draws, max_batch=self.max_batch)
        random = task.generator
        noise = torch.randn(images.shape, dtype=images.dtype, device=random.device, generator=random)
        anywhere = images + self.threat.reach(images) * self.threat.direction(noise.to(images.device))
        start = shortfall.value(self.threat.project(anywhere, images)).double()
        progress: dict[str, Tensor] = {}
        for name, view in views.items():
            found = images
            try:
                result = attack.attempt(view, images, labels, generator=task.generator)
            except NotDifferentiable:
                pass
            else:
                task.model.count(result, few)
                found = result.images
            progress[name] = start - shortfall.value(found).double()
        first = next(iter(views))

        def ahead(name: str) -> float:
            """By how many standard errors a way comes more than twice as far as the first."""
            difference = progress[name] - 2 * progress[first].clamp(min=0)
            error = float(difference.std(correction=0)) / max(1, len(difference) - 1) ** 0.5
            return float(difference.mean()) / max(error, 1e-12)

        order = sorted(views, key=lambda name: name == first or ahead(name) <= 3)
        spent = steps * len(views) * len(labels) // len(task.labels)
        return {name: views[name] for name in order}, min(spent, self.passes - 1)

    def _deterministic_members(self, task: Task) -> Iterator[Member]:
        model, views = task.model.model, gradient_views(task.model.model)
        common: dict[str, Any] = {"threat": self.threat, "max_batch": self.max_batch}
        with torch.no_grad():
            classes = task.model(task.images[:1], slice(0, 1)).shape[1]
        # The published number of steps, but for budgets that are too small for any result.
        steps = min(100, max(2, self.passes // 4))
        # AutoAttack knows neither l0 nor, in its targeted losses, fewer than four classes.
        published = self.threat.norm != "l0" and classes >= 4
        if not published or len(views) > 1:
            for name, view in views.items():
                for title, loss in (("cross-entropy", CROSS_ENTROPY), ("margin", MARGIN)):
                    yield Member(f"{name}, {title}", APGD(loss=loss, steps=steps, **common), view)
        if published:
            parts = AutoAttack(**common).attacks
            # The first two decide nearly always; the other two take most of the time.
            chosen = parts[:2] if self.passes < PASSES["standard"] else parts
            yield Member("AutoAttack", AutoAttack(attacks=chosen, steps=steps, **common), model)
        else:
            yield self._from_scores(model, self.passes)

    def _from_scores(self, model: Model, proposals: int) -> Member:
        search = RandomSearch(threat=self.threat, proposals=proposals, draws=self.draws, max_batch=self.max_batch)
        return Member("random search", search, model, False)

    def resolved(self, random: bool) -> Self:
        return self


class _Selection:
    """The worst image of each example so far, by correct classifications on draws made only for this."""

    def __init__(self, task: Task, draws: int, max_batch: int) -> None:
        self.task, self.draws, self.max_batch = task, draws, max_batch
        self.images = task.images.clone()
        self.members = [CLEAN] * len(task.images)
        everything = torch.arange(len(task.images), device=task.images.device)
        self.correct, self.margin = self._score(self.images, everything)

    def is_robust(self) -> Tensor:
        """Examples that some selection draw still classifies correctly."""
        return self.correct > 0

    def robust(self) -> Tensor:
        """The numbers of those examples."""
        return self.is_robust().nonzero().squeeze(1)

    def consider(self, images: Tensor, examples: Tensor, name: str) -> None:
        """Keep each image that is classified correctly by fewer draws; of equal ones the higher mean margin."""
        correct, margin = self._score(images, examples)
        tied = (correct == self.correct[examples]) & (margin > self.margin[examples])
        worse = (correct < self.correct[examples]) | tied
        chosen = examples[worse]
        self.images[chosen] = images[worse]
        self.correct[chosen], self.margin[chosen] = correct[worse], margin[worse]
        for example in chosen.tolist():
            self.members[example] = name

    @torch.no_grad()
    def _score(self, images: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        labels = self.task.labels[examples]
        correct, margin = torch.zeros_like(labels), images.new_zeros(len(images))
        together = max(1, min(self.draws, self.max_batch // max(1, len(images))))
        for done in range(0, self.draws, together):
            count = min(together, self.draws - done)
            for first in range(0, len(images), self.max_batch):
                block = slice(first, first + self.max_batch)
                logits = self.task.model(images[block].repeat(count, 1, 1, 1), examples[block], count)
                repeated = labels[block].repeat(count)
                correct[block] += (logits.argmax(1) == repeated).view(count, -1).sum(0)
                margin[block] += MARGIN(logits, repeated).view(count, -1).sum(0)
        return correct, margin / self.draws


def gradient_views(model: Model) -> dict[str, Model]:
    """The ways for gradients to pass a model: exact and BPDA of a preprocessing defense, else the only one."""
    # Asked by name: attacks know a callable, and nothing of the defenses.
    change: Any = getattr(model, "with_gradient", None)
    if change is None:
        return {"gradient": model}
    return {"exact gradient": change("exact"), "BPDA": change("bpda")}


def _shortfall(logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
    """How far a draw is from being wrong; 0 if it is, however clearly."""
    return MARGIN(logits, labels).neg().clamp(min=0)


def own_classifier(task: Task) -> Model | None:
    """The classifier behind a preprocessing defense, if it takes images as they are; None otherwise."""
    classifier = getattr(task.model.model, "classifier", None)
    if not callable(classifier):
        return None
    try:
        with torch.no_grad():
            Queries(classifier, task.labels[:1])(task.images[:1])
    except (RuntimeError, ConfigurationError):
        # It expects what its preprocessing makes, such as more channels.
        return None
    return classifier


def _divided(passes: int, others: int) -> dict[str, int]:
    """Gradient passes of each attack. One attack that converges finds more than several that do not."""
    spare = max(0, passes - max(FIRST_PASSES, int(FIRST_SHARE * passes)))
    parts = {"cross-entropy": 0.4, "others": 0.25 if others else 0.0, "targeted": 0.35}
    found = {name: int(part * spare) for name, part in parts.items()}
    found = {name: count if count >= LEAST_PASSES else 0 for name, count in found.items()}
    return {"margin": passes - sum(found.values()), **found}
