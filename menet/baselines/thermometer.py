"""Thermometer encoding (Buckman, Roy, Raffel & Goodfellow, 2018): each pixel as a unary code."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed


def thermometer(images: Float[Tensor, "b c h w"], levels: int = 16) -> Float[Tensor, "b codes h w"]:
    """Codes τ(x)ₗ = 1 where x > l/levels, else 0, for l from 0 to levels − 1: `levels` channels for each.

    The derivative is zero wherever it exists, and that is what autograd returns.
    """
    return _above(images, levels).clamp(0, 1).ceil().flatten(1, 2)


def ramp(images: Float[Tensor, "b c h w"], levels: int = 16, width: float = 1.0) -> Float[Tensor, "b codes h w"]:
    """The differentiable substitute of BPDA: min(max((x − l/levels)/width, 0), 1).

    Width 1 is the substitute of Athalye, Carlini & Wagner (2018), whose ceiling is the code. With width 1/levels
    only the level that contains the pixel has a gradient.
    """
    return (_above(images, levels) / width).clamp(0, 1).flatten(1, 2)


class Thermometer(Preprocessed):
    """Classify thermometer codes; the classifier has `levels` input channels per image channel.

    The classifier sees codes, not pixels, so it must not normalize them; `models.build` does not when the number
    of channels differs from that of the dataset. `width` is that of the `ramp` used by `bpda`.
    `gradient="exact"` is zero: the codes are step functions.
    """

    name: ClassVar[str] = "thermometer"

    def __init__(
        self,
        classifier: nn.Module,
        levels: int = 16,
        width: float = 1.0,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if levels < 1:
            raise ConfigurationError(f"expected levels >= 1, got {levels}")
        if not 0 < width <= 1:
            raise ConfigurationError(f"expected width in (0, 1], got {width}")
        self.levels, self.width = levels, width

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        return thermometer(images, self.levels)

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Tensor:
        return ramp(images, self.levels, self.width)

    def visible(self, seen: Tensor) -> Float[Tensor, "b c h w"]:
        """Codes decoded to pixels: the mean over levels."""
        return seen.unflatten(1, (-1, self.levels)).mean(2)

    @classmethod
    def classifier_channels(cls, channels: int, settings: dict[str, Any]) -> int:
        levels: int = settings.get("levels", 16)
        return channels * levels

    def settings(self) -> dict[str, Any]:
        return {"levels": self.levels, "width": self.width, "gradient": self.gradient}


def _above(images: Tensor, levels: int) -> Tensor:
    thresholds = torch.arange(levels, dtype=images.dtype, device=images.device) / levels
    return images[:, :, None] - thresholds[:, None, None]
