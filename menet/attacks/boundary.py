"""The Boundary attack (Brendel et al. 2018), by foolbox."""

from dataclasses import dataclass
from typing import Any

from menet.attacks.decision import DecisionAttack


@dataclass(frozen=True, kw_only=True)
class Boundary(DecisionAttack):
    """A random walk along the decision boundary that shortens the l2 distance; the paper takes 1000 steps."""

    steps: int = 1000

    def foolbox_attack(self) -> Any:
        from foolbox.attacks import BoundaryAttack

        return BoundaryAttack(steps=self.steps)
