"""Feature squeezing (Xu, Evans & Qi, 2018): fewer values per channel, or the median of a window."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed


def reduce_depth(images: Float[Tensor, "*shape"], bits: int = 5) -> Float[Tensor, "*shape"]:
    """Round to the nearest of 2^bits evenly spaced values; the derivative is zero wherever it exists."""
    steps = 2**bits - 1
    return (images * steps).round() / steps


class BitDepth(Preprocessed):
    """Classify images of reduced bit depth (`reduce_depth`). The authors use 1 bit on MNIST and 5 on CIFAR-10.

    `gradient="exact"` is zero: rounding is piecewise constant. `bpda` uses the identity.
    """

    name: ClassVar[str] = "bit-depth"

    def __init__(self, classifier: nn.Module, bits: int = 5, gradient: Gradient = "bpda", seed: int = 0) -> None:
        super().__init__(classifier, gradient, seed)
        if not 1 <= bits <= 16:
            raise ConfigurationError(f"expected bits from 1 to 16, got {bits}")
        self.bits = bits

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return reduce_depth(images, self.bits)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "gradient": self.gradient}


def median_smooth(images: Float[Tensor, "b c h w"], size: int = 2) -> Float[Tensor, "b c h w"]:
    """The median over size×size windows of each channel, with reflected borders, as in `scipy.ndimage`.

    For an even number of values it is the upper of the two in the middle. Differentiable almost everywhere: the
    gradient goes to the pixel that is the median.
    """
    before, after = size // 2, (size - 1) // 2
    for dim in (-2, -1):
        images = images.index_select(dim, _reflected(images.shape[dim], before, after, images.device))
    windows = images.unfold(-2, size, 1).unfold(-2, size, 1).flatten(-2)
    return windows.sort(-1).values[..., size * size // 2]


class MedianSmoothing(Preprocessed):
    """Classify median-filtered images (`median_smooth`); the authors' window is 2×2, on MNIST also 3×3.

    `gradient="exact"`, the default, passes to the pixels that are medians. `bpda` uses the identity and is
    weaker, because it ignores which pixels matter.
    """

    name: ClassVar[str] = "median"

    def __init__(self, classifier: nn.Module, size: int = 2, gradient: Gradient = "exact", seed: int = 0) -> None:
        super().__init__(classifier, gradient, seed)
        if size < 1:
            raise ConfigurationError(f"expected size >= 1, got {size}")
        self.size = size

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return median_smooth(images, self.size)

    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "gradient": self.gradient}


def _reflected(length: int, before: int, after: int, device: torch.device) -> Tensor:
    """Indices that extend a line by its reflection, the end itself included: … 1 0 | 0 1 2 … ."""
    index = torch.arange(-before, length + after, device=device) % (2 * length)
    return torch.minimum(index, 2 * length - 1 - index)
