"""What all networks share: normalization, a body that computes feature vectors, a linear head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.errors import ConfigurationError


@dataclass(frozen=True)
class Architecture:
    """All that is needed to build a network again, without its weights."""

    name: str
    channels: int
    side: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.channels}×{self.side}×{self.side}, {self.classes} classes)"


class Normalize(nn.Module):
    """(images − mean) / std per channel, the first layer of a network.

    Attacks and defenses therefore only see pixels in [0,1]. Mean and standard deviation are buffers: they move
    with the network's device and are stored with its weights. Images with another number of channels are
    refused, since one channel would silently broadcast over three.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if images.shape[1] != len(self.mean):
            raise ConfigurationError(f"expected images of {len(self.mean)} channels, got {images.shape[1]}")
        return (images - self.mean) / self.std


class Body(nn.Module):
    """The layers between normalization and head: images (b,c,h,w) → feature vectors (b, width).

    One that sees an image in cells returns a vector for each, (b, cells, width).
    """

    width: int


class Network(nn.Module):
    """A classifier of images in [0,1].

    `features` returns the penultimate activations (t-SNE and class distances are computed from them), `forward`
    applies the linear `head` to them, and `architecture` says how the network was built.
    """

    def __init__(self, architecture: Architecture, body: Body) -> None:
        super().__init__()
        self.architecture = architecture
        self.normalize = Normalize(architecture.mean, architecture.std)
        self.body = body
        self.head = nn.Linear(body.width, architecture.classes, device=next(body.parameters()).device)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        """The penultimate activations, which the head maps to logits; of cells their mean."""
        vectors: Tensor = self.body(self.normalize(images))
        return vectors.mean(1) if vectors.ndim == 3 else vectors

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        logits: Tensor = self.head(self.features(images))
        return logits

    @property
    def partitions(self) -> Int[Tensor, "r h w"] | None:
        """Of a network of experts the cell that each pixel belongs to, in each partition; None for others."""
        layout: Tensor | None = getattr(self.body, "layout", None)
        return layout

    def cell_logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b cells classes"]:
        """The logits of each cell of a network of experts, whose mean `forward` returns; of others one cell."""
        vectors: Tensor = self.body(self.normalize(images))
        logits: Tensor = self.head(vectors)
        return logits if logits.ndim == 3 else logits[:, None]


def average(maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c"]:
    """Global average pooling, which makes a network independent of the image size."""
    return torch.mean(maps, dim=(2, 3))
