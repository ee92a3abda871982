"""DenseNet (Huang et al. 2017) for small images."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.models.network import Body, average


class DenseLayer(nn.Module):
    """Bottleneck 1×1 then 3×3 convolution, pre-activated; its input is concatenated with `growth` new maps."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(inputs)
        self.first = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(4 * growth)
        self.second = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        inner = self.first(torch.relu(self.first_norm(maps)))
        return torch.cat([maps, self.second(torch.relu(self.second_norm(inner)))], dim=1)


class Transition(nn.Module):
    """Halves the number of maps and the resolution."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.reduce = nn.Conv2d(inputs, inputs // 2, 1, bias=False)

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        return nn.functional.avg_pool2d(self.reduce(torch.relu(self.norm(maps))), 2)


class DenseNet(Body):
    """Dense blocks with transitions between them, behind a 3×3 stem at full resolution.

    The default is DenseNet-121. The ImageNet form starts with a 7×7 convolution of stride 2 and max pooling,
    which would leave 64×64 images 2×2 positions at the end; this form, otherwise the same, leaves them 8×8.
    """

    def __init__(self, channels: int, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        for block, count in enumerate(blocks):
            if block > 0:
                layers.append(Transition(width))
                width //= 2
            for _ in range(count):
                layers.append(DenseLayer(width, growth))
                width += growth
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(width)
        self.width = width

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(torch.relu(self.norm(self.blocks(self.stem(images)))))
