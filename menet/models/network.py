"""What all networks share: normalise, a body that makes feature vectors, a linear head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.models.normalise import Normalise


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


class Body(nn.Module):
    """What a network has between normalisation and head: images (b,c,h,w) → vectors (b, width)."""

    width: int


class Network(nn.Module):
    """A classifier of images in [0,1].

    `features` gives the penultimate vectors (t-SNE and class distances are made from them) and `forward` is
    the linear `head` applied to them. `architecture` says how it was built.
    """

    def __init__(self, architecture: Architecture, body: Body) -> None:
        super().__init__()
        self.architecture = architecture
        self.normalise = Normalise(architecture.mean, architecture.std)
        self.body = body
        self.head = nn.Linear(body.width, architecture.classes, device=next(body.parameters()).device)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        """The vectors that the last linear layer sees."""
        vectors: Tensor = self.body(self.normalise(images))
        return vectors

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        logits: Tensor = self.head(self.features(images))
        return logits


def average(maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c"]:
    """Global average pooling: what makes a network independent of the side of its images."""
    return torch.mean(maps, dim=(2, 3))
