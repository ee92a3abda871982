"""What an adversary may do to an image: the norm, its size, and the range of pixels."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from menet.attacks.kinds import Images, Losses
from menet.errors import AttackError, ConfigurationError

Norm = Literal["linf", "l2"]


@dataclass(frozen=True)
class ThreatModel:
    """All images within `epsilon` of the original in `norm` whose pixels lie in [low, high].

    `epsilon` is in pixels of the [0,1] scale (8/255 for CIFAR-10, 0.3 for MNIST in the paper); `math.inf`
    leaves the distance free, which only minimum-norm attacks accept.
    """

    norm: Norm = "linf"
    epsilon: float = 8 / 255
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ConfigurationError(f"norm is {self.norm!r}; accepted are {', '.join(get_args(Norm))}")
        if not self.epsilon >= 0:
            raise ConfigurationError(f"epsilon is {self.epsilon}; it must be 0 or more")
        if not self.low < self.high:
            raise ConfigurationError(f"low is {self.low} and high is {self.high}; low must be below high")

    @property
    def bounded(self) -> bool:
        """Whether `epsilon` limits anything."""
        return math.isfinite(self.epsilon)

    def distance(self, images: Images, origin: Images) -> Losses:
        """How far each image is from its original, in the norm of the threat model."""
        difference = (images - origin).flatten(1)
        return difference.abs().amax(1) if self.norm == "linf" else difference.norm(dim=1)

    def project(self, images: Images, origin: Images) -> Images:
        """The allowed image on the way to `images`: nearest for linf, towards the original for l2.

        Clipping to the pixel range comes last; as the original is inside the range it never lengthens a
        change.
        """
        if self.norm == "linf":
            inside = torch.clamp(images, origin - self.epsilon, origin + self.epsilon)
        else:
            change = images - origin
            inside = origin + change * (self.epsilon / _length(change)).clamp(max=1)
        return inside.clamp(self.low, self.high)

    def random_start(self, origin: Images, generator: torch.Generator) -> Images:
        """A uniform draw from the ball around `origin`, clipped to the pixel range."""
        blank = torch.empty(origin.shape, dtype=origin.dtype, device=generator.device)
        if self.norm == "linf":
            change = blank.uniform_(-1, 1, generator=generator)
        else:
            change = blank.normal_(generator=generator)
            # The volume of a d-ball grows as radius^d, so a uniform draw has radius u^(1/d).
            share = torch.empty_like(blank[:, :1, :1, :1]).uniform_(generator=generator)
            change = change / _length(change) * share ** (1 / origin[0].numel())
        return self.project(origin + self.epsilon * change.to(origin.device), origin)

    def direction(self, gradient: Images) -> Images:
        """The unit step that raises a linear loss most: signs for linf, the gradient's direction for l2."""
        return gradient.sign() if self.norm == "linf" else gradient / _length(gradient)

    def check(self, images: Images, origin: Images) -> None:
        """Raise `AttackError`, naming the example, when any image left the ball or the range of pixels."""
        tolerance = 16 * torch.finfo(images.dtype).eps
        far = self.distance(images, origin) > self.epsilon * (1 + tolerance) + tolerance
        # Written so that a pixel that is not a number counts as outside.
        outside = ~((images >= self.low) & (images <= self.high)).flatten(1).all(1)
        if (far | outside).any():
            example = int((far | outside).nonzero()[0])
            raise AttackError(
                f"the attack left its threat model at example {example}: {self.norm} distance "
                f"{float(self.distance(images, origin)[example]):.6g} (epsilon {self.epsilon:.6g}), pixels "
                f"{float(images[example].min()):.6g} to {float(images[example].max()):.6g} "
                f"(range {self.low:g} to {self.high:g})"
            )


CIFAR10 = ThreatModel("linf", 8 / 255)
"""The paper's threat model for CIFAR-10, the default of every attack within a ball."""

SMALLEST_L2 = ThreatModel("l2", math.inf)
"""Any change, as long as it is as short as can be found."""


def _length(change: Tensor) -> Tensor:
    smallest = torch.finfo(change.dtype).tiny
    return change.flatten(1).norm(dim=1).clamp_min(smallest).view(-1, 1, 1, 1)
