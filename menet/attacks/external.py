"""Attacks of other libraries: a model and a random stream for them, CW-L2 by foolbox, AutoAttack by pyautoattack.

Boundary and HopSkipJump (`decision_based`) and Square (`score_based`) use the same bridge.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from menet.attacks.base import Attack, AttackResult, Queries, Task, is_deterministic, wide
from menet.attacks.ensemble import WorstCase
from menet.attacks.eot import MAX_BATCH
from menet.attacks.losses import DLR, CrossEntropy
from menet.attacks.pgd import APGD
from menet.attacks.threat import CIFAR10, MINIMUM_L2, ThreatModel
from menet.errors import AttackError, ConfigurationError, NotDifferentiable, require
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


@dataclass(frozen=True, kw_only=True)
class CWL2(Attack):
    """The smallest l2 perturbation that is misclassified with a given confidence (Carlini & Wagner 2017).

    `unprojected` holds what was found; `images` is its projection into the threat model, which the model may
    classify correctly again. Where the confidence is out of reach the original image is returned and marked in
    `failed`; foolbox returns a black image there and calls it a success.
    """

    title: ClassVar[str] = "CW-L2"

    threat: ThreatModel = MINIMUM_L2
    confidence: float = 0.0
    """By how much, in logits, the wrong class must win (κ)."""
    steps: int = 1000
    binary_search_steps: int = 9
    """Rounds of the search for the weight of the confidence term."""
    step_size: float = 0.01
    initial_const: float = 0.001
    """The first such weight."""

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("steps", "binary_search_steps", "step_size", "initial_const"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"expected {name} > 0, got {getattr(self, name)}")
        if not self.confidence >= 0:
            raise ConfigurationError(f"expected confidence >= 0, got {self.confidence}")

    def run(self, task: Task) -> AttackResult:
        foolbox = require("foolbox", extra="external")
        attack = foolbox.attacks.L2CarliniWagnerAttack(
            binary_search_steps=self.binary_search_steps,
            steps=self.steps,
            stepsize=self.step_size,
            confidence=self.confidence,
            initial_const=self.initial_const,
        )
        criterion = (
            foolbox.criteria.Misclassification(task.labels)
            if task.targets is None
            else foolbox.criteria.TargetedMisclassification(task.targets)
        )
        with bridged(task, self.title) as (bridge, _), torch.enable_grad():
            bounds = (self.threat.low, self.threat.high)
            model = foolbox.PyTorchModel(bridge, bounds, task.images.device)
            found = attack.run(model, task.images, criterion)
        found = found.to(task.images.dtype).clamp(*bounds)
        # Pixels made by tanh are never all 0: this is foolbox's mark for "nothing found".
        failed = (found == 0).flatten(1).all(1)
        found = torch.where(wide(failed), task.images, found)
        return task.result(self.threat.project(found, task.images), failed=failed, unprojected=found)


@dataclass(frozen=True, kw_only=True)
class AutoAttack(Attack):
    """APGD-CE, APGD-T, FAB-T and Square in turn, each on the examples still robust, as pyautoattack runs them.

    For deterministic models: a random defense with fixed draws, or its vote. Examples that withstand all four are
    returned unchanged and marked in `failed`. pyautoattack does not say which examples a call is about, so that
    `queries` is an upper bound, and `unusable_gradients` a lower one.
    """

    title: ClassVar[str] = "AutoAttack"

    threat: ThreatModel = CIFAR10
    max_batch: int = MAX_BATCH
    attacks: tuple[str, ...] = ("apgd-ce", "apgd-t", "fab-t", "square")
    steps: int = 100
    """Steps of APGD and FAB."""
    max_queries: int = 5000
    """Queries per example of Square, at most."""

    targetable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_unit_range(self.threat, "pyautoattack")
        self.threat.require("linf", "l2", by=self.title)
        known = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
        unknown = sorted(set(self.attacks) - set(known))
        if not self.attacks or unknown:
            wrong = f"unknown attack {unknown[0]!r} in AutoAttack" if unknown else "AutoAttack without attacks"
            raise ConfigurationError(f"{wrong}; choose from {', '.join(known)}")

    def run(self, task: Task) -> AttackResult:
        library = require("pyautoattack", extra="external")
        require_determinism(task, self.title)
        with torch.no_grad():
            classes = task.model(task.images[:1], slice(0, 1)).shape[1]
        if classes < 4:
            raise ConfigurationError(
                f"expected a model of at least 4 classes for AutoAttack's targeted loss, got {classes}"
            )
        # pyautoattack's check for dynamic defenses removes any trace function, such as that of coverage.
        tracing = sys.gettrace()
        with bridged(task, self.title) as (bridge, seed):
            suite = library.AutoAttack(
                bridge,
                attacks=list(self.attacks),
                version="custom",
                device=task.images.device,
                eps=self.threat.epsilon,
                norm=NORMS[self.threat.norm],
                seed=seed,
            )
            # The settings of version="standard", which cannot be combined with any others.
            suite.apgd.n_restarts = suite.fab.n_restarts = suite.apgd_targeted.n_restarts = 1
            suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = min(9, classes - 1)
            for part in (suite.apgd, suite.apgd_targeted, suite.fab):
                part.n_iter = self.steps
            suite.square.n_queries = self.max_queries
            try:
                found, _ = suite.run_standard_evaluation(
                    task.images.float(), task.labels, batch_size=self.max_batch
                )
            finally:
                sys.settrace(tracing)
            with torch.no_grad():
                failed = task.model(found.to(task.images.dtype)).argmax(1) == task.labels
        return task.result(self.threat.project(found.to(task.images.dtype), task.images), failed=failed)


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
