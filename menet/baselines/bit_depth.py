"""Bit-depth reduction (feature squeezing: Xu, Evans & Qi, 2018): fewer grey values per channel."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed


def reduce_depth(images: Float[Tensor, "*shape"], bits: int = 5) -> Float[Tensor, "*shape"]:
    """Each value moved to the nearest of 2^bits evenly spaced ones; its derivative is zero wherever it exists."""
    steps = 2**bits - 1
    return (images * steps).round() / steps


class BitDepth(Preprocessed):
    """`classifier` behind `reduce_depth`. The authors use 1 bit on MNIST and 5 on CIFAR-10.

    `gradient="exact"` is zero: rounding is flat between its steps. `bpda` is the identity.
    """

    name: ClassVar[str] = "bit-depth"

    def __init__(self, classifier: nn.Module, bits: int = 5, gradient: Gradient = "bpda", seed: int = 0) -> None:
        super().__init__(classifier, gradient, seed)
        if not 1 <= bits <= 16:
            raise ConfigurationError(f"bits is {bits}; accepted are whole numbers from 1 to 16")
        self.bits = bits

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return reduce_depth(images, self.bits)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "gradient": self.gradient}
