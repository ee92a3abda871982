"""Square attack (Andriushchenko et al. 2020), by pyautoattack."""

from dataclasses import dataclass

import torch

from menet.attacks.base import Attack, Task
from menet.attacks.foreign import NORMS, bridged, require_unit_range
from menet.attacks.result import AttackResult
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Random search over squares that keeps what raises the margin; asks only for scores.

    Returns the image with the highest margin seen, also where it was not enough, so that a random model can
    be scored on fresh draws. An example is left alone after its first misclassified draw.
    """

    threat: ThreatModel = CIFAR10
    calls: int = 5000
    """Most calls of the model for an example."""
    first_share: float = 0.8
    """Share of the pixels in the first squares."""

    def __post_init__(self) -> None:
        if self.calls < 1:
            raise ConfigurationError(f"calls is {self.calls}; it must be 1 or more")
        require_unit_range(self.threat, "pyautoattack")

    def run(self, task: Task) -> AttackResult:
        from pyautoattack.square import SquareAttack

        with bridged(task, "Square") as (bridge, seed), torch.no_grad():
            square = SquareAttack(
                bridge,
                norm=NORMS[self.threat.norm],
                n_queries=self.calls,
                eps=self.threat.epsilon,
                p_init=self.first_share,
                seed=seed,
                targeted=task.targets is not None,
                device=task.images.device,
            )
            images = task.images.float()
            square.init_hyperparam(images)
            calls, found = square.attack_single_run(images, task.labels if task.targets is None else task.targets)
        found = self.threat.project(found.to(task.images.dtype), task.images)
        return AttackResult(found, queries=calls.to(torch.int64))
