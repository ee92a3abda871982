"""Targeted attacks on several classes in turn."""

from dataclasses import dataclass

import torch

from menet.attacks.base import Attack, Task
from menet.attacks.eot import ROWS
from menet.attacks.result import AttackResult
from menet.attacks.strongest import strongest
from menet.attacks.threat import ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True)
class MultiTargeted(Attack):
    """Run `attack` towards each of the likeliest wrong classes, and keep the image that fools most.

    With `APGD(loss=DLR())` inside this is the APGD-T of AutoAttack. To choose the classes yourself call the
    attack with `targets=`.
    """

    attack: Attack
    classes: int = 9
    """How many wrong classes to try; all of them when the model has fewer."""
    draws: int = 1
    """Draws of the model's randomness when classes are ranked and outcomes compared."""
    rows: int = ROWS

    targetable = False

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise ConfigurationError(f"classes is {self.classes}; it must be 1 or more")

    @property
    def threat(self) -> ThreatModel:
        return self.attack.threat

    def run(self, task: Task) -> AttackResult:
        with torch.no_grad():
            logits = torch.stack([task.model(task.images) for _ in range(self.draws)]).mean(0)
        wrong = logits.scatter(1, task.labels[:, None], -torch.inf)
        ranked = wrong.argsort(1, descending=True)[:, : min(self.classes, logits.shape[1] - 1)]
        results = [task.hand_to(self.attack, targets=targets) for targets in ranked.unbind(1)]
        return strongest(task, results, self.draws, self.rows)
