"""Residual networks: ResNet in its CIFAR form, two for a few cores, and wide ones, which preactivate."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.models.network import Body, average

SMALL_SIDE = 48
"""Up to this side the stem of `Compact` halves the resolution, above it quarters it."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch normalization plus a shortcut (He et al. 2016, figure 5 left).

    Where the shape changes, the shortcut is a 1×1 convolution with batch normalization.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        inner = torch.relu(self.first_norm(self.first(maps)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut(maps))


class ResNet(Body):
    """A 3×3 stem at full resolution and stages of basic blocks; all stages but the first halve the resolution.

    `widths` and `blocks` are one number per stage. ResNet-18 is the default.
    """

    def __init__(
        self, channels: int, widths: Sequence[int] = (64, 128, 256, 512), blocks: Sequence[int] = (2, 2, 2, 2)
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        layers = []
        inputs = widths[0]
        for stage, (outputs, count) in enumerate(zip(widths, blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.width = inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(self.blocks(torch.relu(self.stem_norm(self.stem(images)))))


class Small(Body):
    """For quick runs, demonstrations and tests: a 4×4 stem of stride 2 and three blocks; 0.3 million weights.

    Halving the resolution in the first layer is what makes it quick: 12 million multiplications for a 32×32
    image, against 556 million of ResNet-18. It is independent of the side through global pooling.
    """

    width = 128

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 32, 4, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(BasicBlock(32, 32, 1), BasicBlock(32, 64, 2), BasicBlock(64, 128, 2))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 128"]:
        return average(self.blocks(torch.relu(self.stem_norm(self.stem(images)))))


class Compact(Body):
    """For robust training on a few cores: a strided stem and three stages of basic blocks.

    Each stage has half the resolution and twice the width of the one before.

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


class PreactivationBlock(nn.Module):
    """Batch normalization, ReLU, 3×3 convolution, twice, plus a shortcut.

    Where the width changes, the shortcut is a bare 1×1 convolution of the normalized maps.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        active = torch.relu(self.first_norm(maps))
        inner = self.second(torch.relu(self.second_norm(self.first(active))))
        return inner + (maps if self.shortcut is None else self.shortcut(active))


class WideResNet(Body):
    """WRN-depth-factor (Zagoruyko and Komodakis 2016), without dropout.

    Three stages of (depth − 4) / 6 blocks are 16, 32 and 64 times `factor` wide.
    """

    def __init__(self, channels: int, depth: int = 28, factor: int = 10) -> None:
        super().__init__()
        count, rest = divmod(depth - 4, 6)
        if rest or count < 1:
            raise ConfigurationError(f"expected a depth of 4 + 6n layers (10, 16, 22, 28, …), got {depth}")
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        layers = []
        inputs = 16
        for stage, outputs in enumerate((16 * factor, 32 * factor, 64 * factor)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(PreactivationBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(inputs)
        self.width = inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(torch.relu(self.norm(self.blocks(self.stem(images)))))
