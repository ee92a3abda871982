"""The threat model: a norm, a budget epsilon, and the pixel range."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from menet.errors import AttackError, ConfigurationError

Norm = Literal["linf", "l2", "l0"]

Images = Float[Tensor, "b c h w"]
Distances = Float[Tensor, " b"]


@dataclass(frozen=True)
class ThreatModel:
    """All images within `epsilon` of the original in `norm` whose pixels lie in [low, high].

    `epsilon` is in pixels of the [0,1] scale (8/255 for CIFAR-10, 0.3 for MNIST in the paper). For `l0` it is
    the number of pixels that may be perturbed, in all their channels, to any value in the range. `math.inf` means
    no budget, which only minimum-norm attacks accept.
    """

    norm: Norm = "linf"
    epsilon: float = 8 / 255
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ConfigurationError(f"unknown norm {self.norm!r}; choose from {', '.join(get_args(Norm))}")
        if not self.epsilon >= 0:
            raise ConfigurationError(f"expected epsilon >= 0, got {self.epsilon}")
        if not self.low < self.high:
            raise ConfigurationError(f"expected low < high, got low {self.low} and high {self.high}")

    @property
    def bounded(self) -> bool:
        """Whether the budget is finite."""
        return math.isfinite(self.epsilon)

    def reach(self, images: Images) -> float:
        """The largest distance that both epsilon and the pixel range allow; for l0, of a single pixel.

        Step sizes follow it rather than epsilon, which may be any number.
        """
        diameter = self.high - self.low
        if self.norm == "l0":
            return diameter
        if self.norm == "l2":
            diameter *= math.sqrt(images[0].numel())
        return min(self.epsilon, diameter)

    def distance(self, images: Images, origin: Images) -> Distances:
        """The norm of each image's perturbation."""
        if self.norm == "l0":
            return (images != origin).any(1).flatten(1).sum(1).to(images.dtype)
        perturbation = (images - origin).flatten(1)
        return perturbation.abs().amax(1) if self.norm == "linf" else perturbation.norm(dim=1)

    def project(self, images: Images, origin: Images, budgets: Distances | None = None) -> Images:
        """`images` projected into the ball, then clipped to the pixel range.

        The original is inside the range, so that clipping never lengthens a perturbation. For l2 the result of
        both is not always the nearest allowed image. For l0 the pixels that changed most keep their perturbation.
        For the other norms each image may have a smaller budget of its own in place of epsilon.
        """
        epsilon = self.epsilon if budgets is None else budgets.view(-1, 1, 1, 1)
        if self.norm == "l0":
            clipped = images.clamp(self.low, self.high)
            size = (clipped - origin).abs().sum(1).flatten(1)
            allowed = min(int(self.epsilon) if self.bounded else size.shape[1], size.shape[1])
            kept = torch.zeros_like(size, dtype=torch.bool)
            kept.scatter_(1, size.topk(allowed, dim=1).indices, True)
            return torch.where(kept.view(len(images), 1, *images.shape[2:]), clipped, origin)
        if self.norm == "linf":
            inside = torch.clamp(images, origin - epsilon, origin + epsilon)
        else:
            perturbation = images - origin
            inside = origin + perturbation * (epsilon / _length(perturbation)).clamp(max=1)
        return inside.clamp(self.low, self.high)

    def random_start(self, origin: Images, generator: torch.Generator) -> Images:
        """A uniform draw from the ball around `origin`, clipped to the pixel range."""
        noise = torch.empty(origin.shape, dtype=origin.dtype, device=generator.device)
        if self.norm != "l2":
            noise.uniform_(-1, 1, generator=generator)
        else:
            noise.normal_(generator=generator)
            # The volume of a d-ball grows as radius^d, so a uniform draw has radius u^(1/d).
            volume = torch.empty_like(noise[:, :1, :1, :1]).uniform_(generator=generator)
            noise = noise / _length(noise) * volume ** (1 / origin[0].numel())
        return self.project(origin + self.reach(origin) * noise.to(origin.device), origin)

    def direction(self, gradient: Images) -> Images:
        """The unit step of steepest ascent: signs for linf, the gradient of length 1 for l2.

        For l0 the gradient scaled to a largest component of 1; projection then keeps its largest pixels.
        """
        if self.norm == "l0":
            largest = gradient.abs().flatten(1).amax(1).clamp_min(torch.finfo(gradient.dtype).tiny)
            return gradient / largest.view(-1, 1, 1, 1)
        return gradient.sign() if self.norm == "linf" else gradient / _length(gradient)

    def require(self, *norms: Norm, by: str) -> None:
        """Raise `ConfigurationError` for a norm that the attack `by` does not support."""
        if self.norm not in norms:
            raise ConfigurationError(f"expected norm {' or '.join(norms)} for {by}, got {self.norm}")

    def check(self, images: Images, origin: Images) -> None:
        """Raise `AttackError`, naming the example, if an image is outside the ball or the pixel range."""
        tolerance = 16 * torch.finfo(images.dtype).eps
        far = self.distance(images, origin) > self.epsilon * (1 + tolerance) + tolerance
        # Written so that a NaN pixel counts as outside.
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
"""The paper's threat model for CIFAR-10, the default of every attack with a budget."""

MINIMUM_L2 = ThreatModel("l2", math.inf)
"""No budget: minimum-norm attacks look for the smallest l2 perturbation."""


def _length(vectors: Tensor) -> Tensor:
    flat, limits = vectors.flatten(1), torch.finfo(vectors.dtype)
    length = flat.norm(dim=1)
    # Squares of very large components overflow, and those of very small ones vanish; scaled ones do neither.
    extreme = ~length.isfinite() | (length < limits.tiny**0.5)
    if extreme.any():
        largest = flat.abs().amax(1).clamp_min(limits.tiny)
        length = torch.where(extreme, largest * (flat / largest[:, None]).norm(dim=1), length)
    return length.clamp_min(limits.tiny).view(-1, 1, 1, 1)
