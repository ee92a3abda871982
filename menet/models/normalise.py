"""Normalisation as the first layer of a network, so that attacks and defenses only see pixels in [0,1]."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError


class Normalise(nn.Module):
    """(images − mean) / std, one mean and standard deviation per channel.

    Both are buffers: they follow the network's device and are stored with its weights. Images with another
    number of channels are refused, since one channel would silently broadcast over three.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if images.shape[1] != len(self.mean):
            raise ConfigurationError(
                f"images: {images.shape[1]} channels, but the network was built for {len(self.mean)}"
            )
        return (images - self.mean) / self.std
