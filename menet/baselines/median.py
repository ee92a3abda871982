"""Median smoothing (feature squeezing: Xu, Evans & Qi, 2018): each pixel the median of its window."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed


def median_smooth(images: Float[Tensor, "b c h w"], size: int = 2) -> Float[Tensor, "b c h w"]:
    """The median over size×size windows, each channel alone; edges are mirrored, as in `scipy.ndimage`.

    For an even number of values it is the upper of the two in the middle. It is differentiable almost everywhere:
    the gradient goes to the pixel that is the median.
    """
    before, after = size // 2, (size - 1) // 2
    for dim in (-2, -1):
        images = images.index_select(dim, _mirrored(images.shape[dim], before, after, images.device))
    windows = images.unfold(-2, size, 1).unfold(-2, size, 1).flatten(-2)
    return windows.sort(-1).values[..., size * size // 2]


class MedianSmoothing(Preprocessed):
    """`classifier` behind `median_smooth`; the authors' window is 2×2, on MNIST also 3×3.

    `gradient="exact"`, the default, passes to the pixels that are medians. `bpda` is the identity, and weaker: it
    does not know which pixels count.
    """

    name: ClassVar[str] = "median"

    def __init__(self, classifier: nn.Module, size: int = 2, gradient: Gradient = "exact", seed: int = 0) -> None:
        super().__init__(classifier, gradient, seed)
        if size < 1:
            raise ConfigurationError(f"size is {size}; accepted are whole numbers from 1")
        self.size = size

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return median_smooth(images, self.size)

    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "gradient": self.gradient}


def _mirrored(length: int, before: int, after: int, device: torch.device) -> Tensor:
    """Indices that repeat a line mirrored at its ends, the end itself included: … 1 0 | 0 1 2 … ."""
    index = torch.arange(-before, length + after, device=device) % (2 * length)
    return torch.minimum(index, 2 * length - 1 - index)
