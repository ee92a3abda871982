"""Experts for the cells of an image: small perceptrons, each of which sees a few pixels of its own."""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet import masks
from menet.errors import ConfigurationError
from menet.models.network import Body

LARGEST_SIDE = 512


class Experts(Body):
    """A perceptron of two hidden layers for each cell of some partitions of the image (`masks.lattices`).

    An expert's vector depends on the pixels of its cell alone, which is what a certificate by partitions rests on
    (Hammoudeh & Lowd 2023 train an ensemble for it). All experts are computed together, as batched products: every
    step of training shows each of them each image. It only takes images of the side it was built for.
    """

    def __init__(self, channels: int, side: int, partitions: int, cells: int, width: int = 128) -> None:
        super().__init__()
        if side > LARGEST_SIDE:
            raise ConfigurationError(f"expected side <= {LARGEST_SIDE} for experts, got {side}")
        self.width, self.side, self.cells, self.partitions = width, side, cells, partitions
        inputs = channels * pixels_of_cells(partitions, cells, side).shape[1]
        self.first = GroupedLinear(partitions * cells, inputs, width)
        self.second = GroupedLinear(partitions * cells, width, width)

    @property
    def layout(self) -> Int[Tensor, "r h w"]:
        """The cell of each pixel in each partition; experts come partition by partition."""
        return masks.lattices(self.partitions, self.cells, (self.side, self.side))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b cells width"]:
        pixels = pixels_of_cells(self.partitions, self.cells, self.side).to(images.device)
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


@functools.lru_cache(maxsize=16)
def pixels_of_cells(partitions: int, cells: int, side: int) -> Int[Tensor, "all most"]:
    """The pixels of each cell, partition by partition; the number of pixels of the image stands for none."""
    with torch.device("cpu"):  # also where a network is outlined on the meta device
        cell_of = masks.lattices(partitions, cells, (side, side)).flatten(1)
        own = cell_of + cells * torch.arange(partitions)[:, None]
        sizes = torch.bincount(own.flatten(), minlength=partitions * cells)
        order = own.flatten().argsort(stable=True)
        within = torch.arange(own.numel()) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        found = torch.full((partitions * cells, int(sizes.max())), side * side)
        found[own.flatten()[order], within] = order % (side * side)
        return found
