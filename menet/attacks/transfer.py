"""Transfer attacks: adversarial images crafted on a source model and evaluated on another."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import nn

from menet.attacks.base import Attack, AttackResult, Model, Task
from menet.attacks.threat import ThreatModel


@dataclass(frozen=True)
class Transfer(Attack):
    """Run `attack` on `source`; the attacked model is never queried, so `queries` are zero.

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
