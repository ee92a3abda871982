"""Attacks made on one model and meant for another."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from menet.attacks.base import Attack, Task
from menet.attacks.kinds import Model
from menet.attacks.result import AttackResult
from menet.attacks.threat import ThreatModel


@dataclass(frozen=True)
class Transfer(Attack):
    """Run `attack` on `source`; the model it is called with is never asked, so `queries` are zero.

    The paper's transfer setting takes an independently trained copy of the defended model as the source and
    attacks that white-box.
    """

    attack: Attack
    source: Model = field(repr=False)

    # Left to the attack itself, which is called with all its checks.
    minimum_norm: ClassVar[bool] = True

    @property
    def threat(self) -> ThreatModel:
        return self.attack.threat

    def run(self, task: Task) -> AttackResult:
        return replace(task.hand_to(self.attack, self.source), queries=task.model.counts)


def gray_box(attack: Attack, classifier: Model) -> Transfer:
    """The paper's "limited access" setting: white-box on the network's weights, blind to the preprocessing.

    To the adversary the bare classifier is the whole model; what it finds is transferred to the defended one.
    """
    return Transfer(attack, classifier)
