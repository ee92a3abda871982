"""Tensor estimation: the channels as a third dimension, the step the paper's authors name as promising.

The tubal nuclear norm (Zhang et al., 2014) transforms the channels and sums the nuclear norms of the transformed
slices, so that structure shared by the channels is paid for once. With a real orthogonal transform, here the
discrete cosine transform, instead of Fourier's, everything stays real (Kernfeld et al., 2015).
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from menet.estimators import solver
from menet.estimators.checks import Gradient, checked, estimator, positive, stopping
from menet.estimators.nuclear_norm import ITERATIONS, TOLERANCE


@estimator(dimensions=3)
def tensor(
    x: torch.Tensor,
    mask: torch.Tensor,
    mu: float = 1.0,
    *,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
) -> torch.Tensor:
    """Estimate `(..., c, m, n)` by minimising  mu·Σ_k ‖X̃_k‖_* + ‖mask∘(X − x)‖²  over X.

    X̃ is the orthonormal cosine transform of X along the channels c. With one channel this is `nuclear_norm`.
    Stopping, gradients and the values where nothing is observed are as there.
    """
    stopping(tol, max_iter)
    threshold = x.new_full(x.shape[:1], positive("mu", mu, zero=True) / 2)
    return solver.complete(x, mask, threshold, _mixing_of(x), tol, max_iter)


@dataclass(frozen=True)
class Tensor:
    """`tensor` with its parameters."""

    dimensions: ClassVar[int] = 3
    mu: float = 1.0
    tol: float = TOLERANCE
    max_iter: int = ITERATIONS
    gradient: Gradient = "exact"

    def __post_init__(self) -> None:
        positive("mu", self.mu, zero=True)
        stopping(self.tol, self.max_iter)

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tensor(x, mask, self.mu, tol=self.tol, max_iter=self.max_iter, gradient=self.gradient)

    def solve(self, x: torch.Tensor, mask: torch.Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank (summed over slices) of each block."""
        filled, seen = checked(x, mask, 3)
        blocks = filled.detach().reshape(-1, *x.shape[-3:])
        threshold = blocks.new_full(blocks.shape[:1], self.mu / 2)
        found = solver.describe(
            blocks, seen.reshape(blocks.shape), threshold, _mixing_of(blocks), self.tol, self.max_iter
        )
        return found.of(x, 3)


def _mixing_of(x: torch.Tensor) -> torch.Tensor | None:
    return None if x.shape[1] == 1 else cosine_transform(x.shape[1]).to(x)


@functools.cache
def cosine_transform(size: int) -> torch.Tensor:
    """The orthonormal matrix of the discrete cosine transform (type II) of `size` values."""
    frequency, place = torch.arange(size)[:, None], torch.arange(size)[None, :]
    matrix = (math.pi / size * frequency * (place + 0.5)).double().cos() * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
