"""Total-variation minimization (Guo, Rana, Cissé & van der Maaten, 2018): drop pixels, then fill the gaps.

Here the defense; its solver and the gradient of the minimizer are modules of their own.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet import masks
from menet.baselines.resize_pad import Cropped
from menet.baselines.total_variation.solver import objective, total_variation
from menet.errors import ConfigurationError
from menet.preprocessed import Gradient

__all__ = ["TotalVariation", "objective", "total_variation"]

SCHEDULED = 10
"""Probabilities in a schedule of p, as many as ME-Net has in the paper."""


class TotalVariation(Cropped):
    """Classify total-variation reconstructions from a random fraction `p` of the entries.

    `p=(a, b)` is a schedule of `SCHEDULED` probabilities from which each training image draws one; evaluation
    uses its mean. The authors keep half of the entries and use λ = `weight` = 0.03 on ImageNet. They train the
    classifier on reconstructions, as training here does. `gradient="exact"` is that of the minimizer and of the
    final clipping to [0, 1]; dropped entries have gradient zero. `crop` < 1 adds their random crops at inference,
    see `Cropped`.
    """

    name: ClassVar[str] = "total-variation"

    def __init__(
        self,
        classifier: nn.Module,
        p: float | Sequence[float] = 0.5,
        weight: float = 0.03,
        crop: float = 1.0,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, crop, gradient, seed)
        low, high = (p, p) if isinstance(p, int | float) else p
        if not 0 <= low <= high <= 1:
            raise ConfigurationError(f"expected p in [0, 1], or (a, b) with 0 <= a <= b <= 1, got {p}")
        if not weight > 0:
            raise ConfigurationError(f"expected weight > 0, got {weight}")
        self.p, self.weight = p, weight
        self.schedule = torch.tensor(masks.schedule(low, high, SCHEDULED if high > low else 1))

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        shape = images.shape[1:]

        def drawn(count: int) -> Tensor:
            p = self.schedule.mean().expand(count)
            if self.training and len(self.schedule) > 1:
                p = self.schedule[torch.randint(len(self.schedule), (count,), generator=generator)]
            return masks.bernoulli((count, *shape), p, generator)

        kept = self.draw(drawn, len(images))
        return total_variation(images, kept.to(images.device), self.weight).clamp(0, 1)

    def settings(self) -> dict[str, Any]:
        p = self.p if isinstance(self.p, int | float) else list(self.p)
        return {"p": p, "weight": self.weight, "crop": self.crop, "gradient": self.gradient}
