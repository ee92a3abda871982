"""A small PixelCNN (van den Oord, Kalchbrenner & Kavukcuoglu, 2016): how likely an image is, pixel by pixel.

Pixels follow one another row by row, in a pixel the channels red, green, blue. Each value has a distribution over
`levels` that depends only on those before it: convolutions are masked to see what lies above and to the left, and
feature maps belong to channels, of which the current pixel's see only earlier ones. As in any stack of such
convolutions a wedge at the upper right stays unseen, here beyond the 7×7 window of the first.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, linear, pad

from menet.errors import ConfigurationError
from menet.progress import reporting

FIRST = 7
LATER = 3


class CausalConvolution(nn.Module):
    """A convolution that sees above and to the left, and of the pixel itself channels up to its own.

    Inputs and outputs are in `channels` equal groups, one for each channel of the image. With `strict` a group
    sees only earlier groups of the pixel itself. Weights are zero until `reset`.
    """

    mask: Tensor

    def __init__(self, inputs: int, outputs: int, size: int, channels: int, strict: bool = False) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, size, size))
        self.bias = nn.Parameter(torch.zeros(outputs))
        middle = size // 2
        mask = torch.zeros(outputs, inputs, size, size)
        mask[:, :, :middle] = 1
        mask[:, :, middle, :middle] = 1
        theirs = torch.arange(inputs) // (inputs // channels)
        mine = torch.arange(outputs)[:, None] // (outputs // channels)
        mask[:, :, middle, middle] = (theirs < mine if strict else theirs <= mine).float()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, maps: Float[Tensor, "b inputs h w"]) -> Float[Tensor, "b outputs h w"]:
        return conv2d(maps, self.weight * self.mask, self.bias, padding=self.size // 2)

    def reset(self, generator: torch.Generator) -> None:
        """Draw the weights anew, by what they see."""
        seen = max(1.0, float(self.mask[-1].sum()))
        drawn = torch.randn(self.weight.shape, generator=generator) / math.sqrt(seen)
        self.weight.data.copy_(drawn)
        self.bias.data.zero_()


class PixelCNN(nn.Module):
    """Logits of each pixel's value given those before it.

    `width` feature maps for each channel of the image, `layers` residual blocks, `levels` values from 0 to 1.
    """

    def __init__(self, channels: int = 3, levels: int = 256, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        for name, value, least, most in (
            ("channels", channels, 1, 64),
            ("levels", levels, 2, 256),
            ("width", width, 1, 1024),
            ("layers", layers, 0, 64),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"{name} is {value}; accepted are whole numbers from {least} to {most}")
        self.channels, self.levels, self.width, self.layers = channels, levels, width, layers
        maps = width * channels
        self.first = CausalConvolution(channels, maps, FIRST, channels, strict=True)
        self.blocks = nn.ModuleList(CausalConvolution(maps, maps, LATER, channels) for _ in range(layers))
        self.last = CausalConvolution(maps, channels * levels, 1, channels)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c levels h w"]:
        maps = self.first(2 * images - 1)
        for block in self.blocks:
            maps = maps + block(maps.relu())
        logits: Tensor = self.last(maps.relu()).unflatten(1, (self.channels, self.levels))
        return logits

    def quantise(self, images: Float[Tensor, "b c h w"]) -> Int[Tensor, "b c h w"]:
        """The number of the nearest level."""
        return (images * (self.levels - 1)).round().long()

    def bits_per_dimension(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        """The mean over values of −log₂ of their probability; log₂(levels) is what knowing nothing gives."""
        numbers = self.quantise(images)
        logits = self(numbers / (self.levels - 1))
        return cross_entropy(logits.movedim(2, 1), numbers) / math.log(2)

    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew; the last layer begins at zero, so that all values begin equally likely."""
        for layer in (self.first, *self.blocks):
            layer.reset(generator)
        self.last.weight.data.zero_()
        self.last.bias.data.zero_()

    def settings(self) -> dict[str, Any]:
        return {"channels": self.channels, "levels": self.levels, "width": self.width, "layers": self.layers}


class Raster:
    """A batch of images being written pixel by pixel, and what the network made of them so far.

    Feature maps at a pixel depend on earlier pixels only, so each is computed once and kept: writing all pixels
    costs about as much arithmetic as a single forward pass (for each channel), instead of one pass per pixel.
    """

    def __init__(self, network: PixelCNN, like: Float[Tensor, "b c h w"]) -> None:
        self.network = network
        b, _, h, w = like.shape
        self.layers = [network.first, *network.blocks]
        self.weights = [
            (layer.weight * layer.mask)[:, :, : layer.size // 2 + 1].flatten(1)
            for layer in (*self.layers, network.last)
        ]
        self.planes = [
            pad(like.new_zeros(b, layer.weight.shape[1], h, w), (layer.size // 2,) * 4) for layer in self.layers
        ]

    def logits_at(self, row: int, column: int) -> Float[Tensor, "b c levels"]:
        """The distributions at a pixel; a channel's is right once all earlier pixels and channels are written."""
        maps: Tensor | None = None
        for layer, weight, plane in zip(self.layers, self.weights, self.planes, strict=False):
            middle = layer.size // 2
            if maps is not None:
                plane[:, :, row + middle, column + middle] = maps.relu()
            window = plane[:, :, row : row + middle + 1, column : column + layer.size].flatten(1)
            seen = linear(window, weight, layer.bias)
            maps = seen if maps is None else maps + seen
        assert maps is not None
        logits = linear(maps.relu(), self.weights[-1], self.network.last.bias)
        return logits.unflatten(1, (self.network.channels, self.network.levels))

    def write(self, row: int, column: int, channel: int, values: Float[Tensor, " b"]) -> None:
        self.planes[0][:, channel, row + FIRST // 2, column + FIRST // 2] = 2 * values - 1


def train_pixel_cnn(
    network: PixelCNN,
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    steps: int = 500,
    batch: int = 32,
    rate: float = 3e-3,
) -> PixelCNN:
    """Fit `network` to `images` from fresh weights, by Adam with a rate that falls to zero along a cosine."""
    if steps < 1 or batch < 1:
        raise ConfigurationError(f"steps and batch are {steps} and {batch}; accepted are whole numbers from 1")
    network.reset(generator)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    device = network.last.bias.device
    with reporting("pixel-cnn", steps) as reporter, torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
            chosen = torch.randint(len(images), (batch,), generator=generator)
            bits = network.bits_per_dimension(images[chosen.to(images.device)].to(device))
            optimizer.zero_grad()
            bits.backward()
            optimizer.step()
            reporter.advance(bits=float(bits.detach()))
    return network
