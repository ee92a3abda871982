"""Experts for the cells of an image: small perceptrons, each of which sees a few pixels of its own."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.errors import ConfigurationError
from menet.models.network import Body

LARGEST_SIDE = 512


class Experts(Body):
    """A perceptron of two hidden layers for each cell of some partitions of the image.

    `layout` gives the cell of each pixel of an image of that shape, in each partition (`masks.lattices`). An
    expert's vector depends on the pixels of its cell alone, which is what a certificate by partitions rests on
    (Hammoudeh & Lowd 2023 train an ensemble for it). All experts are computed together, as batched products:
    every step of training shows each of them each image. It only takes images of the side it was built for.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        layout: Callable[[tuple[int, int]], Int[Tensor, "r h w"]],
        width: int = 128,
    ) -> None:
        super().__init__()
        if side > LARGEST_SIDE:
            raise ConfigurationError(f"expected side <= {LARGEST_SIDE} for experts, got {side}")
        # Not buffers: they follow from the name of the network, which may be outlined on the meta device.
        with torch.device("cpu"):
            self.layout = layout((side, side))
            self.pixels = pixels_of_cells(self.layout)
        experts, most = self.pixels.shape
        self.width = width
        self.first = GroupedLinear(experts, channels * most, width)
        self.second = GroupedLinear(experts, width, width)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b cells width"]:
        pixels = self.pixels.to(images.device)
        # Pixels first, so that what is gathered are contiguous rows; a last one of zeros fills small cells.
        flat = nn.functional.pad(images.flatten(2), (0, 1)).permute(2, 1, 0).flatten(1)
        seen = flat[pixels.flatten()].view(*pixels.shape, *images.shape[1::-1]).flatten(1, 2).transpose(1, 2)
        return torch.relu(self.second(torch.relu(self.first(seen)))).transpose(0, 1)


class GroupedLinear(nn.Module):
    """As many linear layers as there are groups, each for its own inputs."""

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(groups, 1, outputs))

    def forward(self, vectors: Float[Tensor, "groups b inputs"]) -> Float[Tensor, "groups b outputs"]:
        return torch.baddbmm(self.bias, vectors, self.weight)


def pixels_of_cells(layout: Int[Tensor, "r h w"]) -> Int[Tensor, "all most"]:
    """The pixels of each cell, partition by partition; the number of pixels of the image stands for none."""
    cells, pixels = int(layout.max()) + 1, layout[0].numel()
    own = (layout.flatten(1) + cells * torch.arange(len(layout))[:, None]).flatten()
    sizes = torch.bincount(own, minlength=len(layout) * cells)
    order = own.argsort(stable=True)
    within = torch.arange(len(own)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    found = torch.full((len(sizes), int(sizes.max())), pixels)
    found[own[order], within] = order % pixels
    return found
