"""HopSkipJump (Chen et al. 2020), by foolbox."""

from dataclasses import dataclass
from typing import Any

from menet.attacks.decision import DecisionAttack


@dataclass(frozen=True, kw_only=True)
class HopSkipJump(DecisionAttack):
    """Descent along gradients estimated at the decision boundary, in the norm of the threat model."""

    steps: int = 64
    first_evaluations: int = 100
    """Evaluations behind the first gradient; their number grows with the square root of the step."""

    def foolbox_attack(self) -> Any:
        from foolbox.attacks import HopSkipJumpAttack

        class NormalisedPerExample(HopSkipJumpAttack):
            """foolbox divides by the norm of the whole batch, so that l2 steps shrink as the batch grows."""

            def approximate_gradients(self, *arguments: Any) -> Any:
                batch = super().approximate_gradients(*arguments)
                lengths = batch.flatten(start=1).norms.l2(axis=-1)
                return batch / (lengths.reshape((-1, 1, 1, 1)) + 1e-12)

        return NormalisedPerExample(
            steps=self.steps,
            initial_gradient_eval_steps=self.first_evaluations,
            constraint=self.threat.norm,
        )
