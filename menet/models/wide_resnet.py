"""Wide residual networks (Zagoruyko and Komodakis 2016), without dropout."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.models.network import Body, average


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
    """WRN-depth-factor: three stages of (depth − 4) / 6 blocks, 16, 32 and 64 times `factor` wide."""

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
