"""LeNet as Madry et al. (2018) used it for MNIST, and the paper after them."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.models.network import Body


class LeNet(Body):
    """Two 5×5 convolutions (32, 64), each followed by ReLU and 2×2 max pooling, then 1024 hidden units.

    The hidden layer sees every position, so the network only takes images of the side it was built for.
    """

    width = 1024

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 32, 5, padding=2)
        self.second = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * (side // 4) ** 2, self.width)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 1024"]:
        maps = nn.functional.max_pool2d(torch.relu(self.first(images)), 2)
        maps = nn.functional.max_pool2d(torch.relu(self.second(maps)), 2)
        return torch.relu(self.hidden(maps.flatten(1)))
