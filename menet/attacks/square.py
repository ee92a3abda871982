"""Square attack (Andriushchenko et al. 2020), by pyautoattack."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from menet.attacks.base import Attack, AttackResult, Task
from menet.attacks.external import NORMS, bridged, require_unit_range
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError, require


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Random search over square perturbations that keeps what raises the margin; needs only scores.

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
