"""Total-variation minimisation (Guo, Rana, Cissé & van der Maaten, 2018): drop pixels, smooth over the gaps."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet import masks
from menet.baselines.variation_solver import total_variation
from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed


class TotalVariation(Preprocessed):
    """`classifier` behind total-variation minimisation from a share `p` of the entries, drawn afresh each time.

    The authors keep half of the entries and use λ = `weight` = 0.03 on ImageNet. They train the classifier on
    such reconstructions, and so does training here. `gradient="exact"` is that of the minimiser and of the final
    clipping to [0, 1]; dropped entries then have gradient zero.
    """

    name: ClassVar[str] = "total-variation"

    def __init__(
        self,
        classifier: nn.Module,
        p: float = 0.5,
        weight: float = 0.03,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 0 <= p <= 1:
            raise ConfigurationError(f"p is {p}; accepted are probabilities from 0 to 1")
        if not weight > 0:
            raise ConfigurationError(f"weight is {weight}; accepted are numbers above 0")
        self.p, self.weight = p, weight

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        shape = images.shape[1:]
        kept = self.draw(lambda count: masks.bernoulli((count, *shape), self.p, generator), len(images))
        return total_variation(images, kept.to(images.device), self.weight).clamp(0, 1)

    def settings(self) -> dict[str, Any]:
        return {"p": self.p, "weight": self.weight, "gradient": self.gradient}
