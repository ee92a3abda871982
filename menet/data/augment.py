"""The paper's augmentation (appendix, training details), batched on tensors of any device."""

from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from menet.errors import ConfigurationError


def crop_and_flip(
    images: Shaped[Tensor, "b c h w"],
    *,
    generator: torch.Generator,
    padding: int = 4,
    flip: bool = True,
) -> Shaped[Tensor, "b c h w"]:
    """Pad by `padding` black pixels, crop at a random offset, and flip horizontally with probability 1/2.

    Each image has its own draws. They come from `generator`, on its own device, in an order that depends only
    on the number of images, so the same generator gives the same crops on a CPU and on a GPU.
    """
    if padding < 0:
        raise ConfigurationError(f"expected padding >= 0, got {padding}")
    count, channels, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=generator.device)
    coins = torch.randint(2, (count, 1), generator=generator, device=generator.device)
    top, left = offsets.to(images.device)
    mirrored = coins.to(images.device).bool() & flip

    rows = top + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    padded = torch.nn.functional.pad(images, [padding] * 4)
    # One flat lookup shared by the channels is several times faster on a CPU than indexing four dimensions.
    stride = width + 2 * padding
    lookup = (rows[:, :, None] * stride + columns[:, None, :]).flatten(1)
    cropped = padded.flatten(2).gather(2, lookup[:, None, :].expand(-1, channels, -1))
    return cropped.unflatten(2, (height, width))


@dataclass(frozen=True)
class CropAndFlip:
    """`crop_and_flip` with its settings, called with `(images, generator=…)`."""

    padding: int = 4
    flip: bool = True

    def __call__(
        self, images: Shaped[Tensor, "b c h w"], *, generator: torch.Generator
    ) -> Shaped[Tensor, "b c h w"]:
        return crop_and_flip(images, generator=generator, padding=self.padding, flip=self.flip)
