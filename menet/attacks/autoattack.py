"""AutoAttack (Croce and Hein 2020): the standard suite, and its variant for random models."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

from menet.attacks.apgd import APGD
from menet.attacks.base import Attack, AttackResult, Task
from menet.attacks.ensemble import WorstCase
from menet.attacks.eot import MAX_BATCH
from menet.attacks.external import NORMS, bridged, require_determinism, require_unit_range
from menet.attacks.losses import DLR, CrossEntropy
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError, require


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
