"""The network for robust training on a few cores."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.models.network import Body, average
from menet.models.resnet import BasicBlock

SMALL_SIDE = 48
"""Up to this side the stem halves the resolution, above it quarters it."""


class Compact(Body):
    """A strided stem and three stages of basic blocks, each of half the resolution and twice the width.

    The stem leaves a 32×32 image 16×16 positions, and a 64×64 image too. Every convolution behind it has many
    channels and few positions, where a CPU comes nearest to the speed of its matrix products; robust features are
    smooth, so that little is lost with the resolution. `benchmarks training` compares it with other shapes.
    """

    def __init__(
        self, channels: int, side: int = 32, widths: Sequence[int] = (96, 192, 384), blocks: int = 1
    ) -> None:
        super().__init__()
        stride = 2 if side <= SMALL_SIDE else 4
        self.stem = nn.Conv2d(channels, widths[0], 2 * stride, stride=stride, padding=stride // 2, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        layers, inputs = [], widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(blocks):
                layers.append(BasicBlock(inputs, outputs, 2 if stage > 0 and block == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.width = inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(self.blocks(torch.relu(self.stem_norm(self.stem(images)))))
