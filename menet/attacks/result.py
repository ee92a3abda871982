"""What an attack hands back."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from menet.attacks.kinds import Images, Labels, Model


@dataclass(frozen=True)
class AttackResult:
    """Adversarial images, one per example, and what finding them took."""

    images: Float[Tensor, "b c h w"]
    queries: Int[Tensor, " b"]
    """How often each example went through the attacked model."""
    trace: Float[Tensor, "steps b"] | None = None
    """Mean loss at the start and after each step, when asked for; with restarts, of the one that was kept."""
    restarts: Float[Tensor, "restarts b c h w"] | None = None
    """Every restart's outcome, if there was more than one; `images` holds those with the highest loss."""
    failed: Bool[Tensor, " b"] | None = None
    """Examples for which the attack found nothing to offer, returned unchanged."""
    unlimited: Float[Tensor, "b c h w"] | None = None
    """What a minimum-norm attack found before it was brought into the ball."""

    @property
    def candidates(self) -> Float[Tensor, "restarts b c h w"]:
        """Every restart's images, or the only ones."""
        return self.images[None] if self.restarts is None else self.restarts


def fooled_by_restart(model: Model, result: AttackResult, labels: Labels) -> Bool[Tensor, "restarts b"]:
    """Whether each restart's image is misclassified, on one fresh call of the model for each restart.

    `.any(0)` is the paper's hard criterion (fooled by any restart counts, Appendix "random restart") and
    `.float().mean(0)` the expected one.
    """
    with torch.no_grad():
        return torch.stack([model(images).argmax(1) != labels for images in result.candidates])


def concatenate(results: Sequence[AttackResult]) -> AttackResult:
    """One result from those of consecutive batches; a part that any of them lacks is left out."""
    joined = {}
    for field in fields(AttackResult):
        parts = [getattr(result, field.name) for result in results]
        if all(part is not None for part in parts):
            joined[field.name] = torch.cat(parts, dim=1 if field.name in ("trace", "restarts") else 0)
    return AttackResult(**joined)


def unchanged(images: Images, failed: bool) -> AttackResult:
    """The result that leaves every image as it is."""
    return AttackResult(
        images=images.clone(),
        queries=torch.zeros(len(images), dtype=torch.int64, device=images.device),
        failed=torch.full((len(images),), failed, device=images.device),
    )
