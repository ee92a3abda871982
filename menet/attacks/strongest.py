"""The best of several attacks, example by example."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet.attacks.base import Attack, Task
from menet.attacks.eot import ROWS, ExpectedLoss
from menet.attacks.losses import Margin
from menet.attacks.result import AttackResult
from menet.attacks.threat import ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True)
class Strongest(Attack):
    """Run every attack, and keep for each example the image that fools the model most.

    Outcomes are compared by their mean margin over `draws` fresh calls of the model. What the attacks
    themselves believed about their success, on draws they chose, plays no part.
    """

    attacks: tuple[Attack, ...]
    draws: int = 1
    rows: int = ROWS

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.attacks or any(attack.threat != self.threat for attack in self.attacks):
            raise ConfigurationError("attacks must be one or more attacks of the same threat model")

    @property
    def threat(self) -> ThreatModel:
        return self.attacks[0].threat

    def run(self, task: Task) -> AttackResult:
        return strongest(task, [task.hand_to(attack) for attack in self.attacks], self.draws, self.rows)


def strongest(task: Task, results: Sequence[AttackResult], draws: int, rows: int) -> AttackResult:
    """The result that takes each example from whichever of `results` fools the task's model most."""
    candidates = torch.cat([result.candidates for result in results])
    margin = ExpectedLoss.of(task, Margin(), draws, rows)
    winner = torch.stack([margin.value(images) for images in candidates]).argmax(0)
    return AttackResult(
        images=candidates[winner, torch.arange(len(winner), device=winner.device)],
        queries=_total([result.queries for result in results]) + task.model.counts,
        restarts=candidates,
    )


def _total(counts: list[Tensor]) -> Tensor:
    return torch.stack(counts).sum(0)
