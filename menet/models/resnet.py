"""Residual networks of basic blocks: ResNet in its CIFAR form, and a small one for two cores."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.models.network import Body, average


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
