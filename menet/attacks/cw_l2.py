"""Carlini and Wagner's original l2 attack (2017), by foolbox."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from menet.attacks.base import Attack, AttackResult, Task, wide
from menet.attacks.external import bridged
from menet.attacks.threat import MINIMUM_L2, ThreatModel
from menet.errors import ConfigurationError, require


@dataclass(frozen=True, kw_only=True)
class CWL2(Attack):
    """The smallest l2 perturbation that is misclassified with a given confidence.

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
