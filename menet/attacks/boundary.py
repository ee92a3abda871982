"""The Boundary attack (Brendel et al. 2018), by foolbox."""

from dataclasses import dataclass
from typing import Any

from menet.attacks.decision import DecisionAttack
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Boundary(DecisionAttack):
    """A random walk along the decision boundary that shortens the l2 distance; the paper takes 1000 steps.

    foolbox adapts the lengths of its steps every tenth step and waits for 100 adaptations, which is nothing
    in 1000 steps. Here it adapts after each, from longer first steps: on digits half the distance is left
    after 1000 steps, at two calls each.
    """

    steps: int = 1000
    first_step: float = 0.1
    """Length of the first steps, as a share of the distance to the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "first_step"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")

    def foolbox_attack(self) -> Any:
        from foolbox.attacks import BoundaryAttack

        return BoundaryAttack(
            steps=self.steps,
            spherical_step=self.first_step,
            source_step=self.first_step,
            update_stats_every_k=1,
        )
