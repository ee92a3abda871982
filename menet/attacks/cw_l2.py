"""Carlini and Wagner's original l2 attack (2017), by foolbox."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from menet.attacks.base import Attack, Task
from menet.attacks.foreign import bridged
from menet.attacks.result import AttackResult
from menet.attacks.threat import SMALLEST_L2, ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class CWL2(Attack):
    """The smallest l2 change that is misclassified with a given confidence.

    `unlimited` holds what was found; `images` is its projection into the threat model, where the model may be
    right again. Examples whose confidence is out of reach come back unchanged, marked in `failed`; foolbox
    returns a black image for them and calls it a success.
    """

    threat: ThreatModel = SMALLEST_L2
    confidence: float = 0.0
    """By how much, in logits, the wrong class must win."""
    steps: int = 1000
    searches: int = 9
    """Rounds of the search for the weight of the confidence term."""
    step_size: float = 0.01
    first_weight: float = 0.001

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("steps", "searches", "step_size", "first_weight"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not self.confidence >= 0:
            raise ConfigurationError(f"confidence is {self.confidence}; it must be 0 or more")

    def run(self, task: Task) -> AttackResult:
        # foolbox is imported here because it needs git on the machine, which no other attack does.
        from foolbox import PyTorchModel
        from foolbox.attacks import L2CarliniWagnerAttack
        from foolbox.criteria import Misclassification, TargetedMisclassification

        attack = L2CarliniWagnerAttack(
            binary_search_steps=self.searches,
            steps=self.steps,
            stepsize=self.step_size,
            confidence=self.confidence,
            initial_const=self.first_weight,
        )
        criterion = (
            Misclassification(task.labels) if task.targets is None else TargetedMisclassification(task.targets)
        )
        with bridged(task, "CW-L2") as (bridge, _), torch.enable_grad():
            bounds = (self.threat.low, self.threat.high)
            found = attack.run(PyTorchModel(bridge, bounds, task.images.device), task.images, criterion)
        found = found.to(task.images.dtype).clamp(*bounds)
        # Pixels made by tanh never all reach 0 by themselves: this is foolbox's mark for "nothing found".
        failed = (found == 0).flatten(1).all(1)
        found = torch.where(failed.view(-1, 1, 1, 1), task.images, found)
        return AttackResult(
            images=self.threat.project(found, task.images),
            queries=task.model.counts,
            failed=failed,
            unlimited=found,
        )
