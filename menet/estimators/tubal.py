"""Tensor completion with channels as a third dimension, which the paper's authors name as a promising extension.

The tubal nuclear norm (Zhang et al., 2014) transforms the channels and sums the nuclear norms of the transformed
slices, so that structure shared by the channels counts once. A real orthogonal transform instead of Fourier's,
here the discrete cosine transform, keeps everything real (Kernfeld et al., 2015).
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet.estimators import solver
from menet.estimators.base import check_nonnegative, check_stopping, checked, estimator, register
from menet.estimators.nuclear_norm import ITERATIONS, TOLERANCE


@estimator(dimensions=3)
def tubal_nuclear_norm(
    x: Tensor,
    mask: Tensor,
    mu: float = 1.0,
    *,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
    gradient_tol: float | None = None,
) -> Tensor:
    """Estimate `(..., c, m, n)` by minimizing  mu·Σ_k ‖X̃_k‖_* + ‖mask∘(X − x)‖²  over X.

    X̃ is the orthonormal cosine transform of X along the channels c. With one channel this is `nuclear_norm`.
    Stopping, gradients and the estimate where nothing is observed are the same as there.
    """
    check_stopping(tol, max_iter, gradient_tol)
    threshold = x.new_full(x.shape[:1], check_nonnegative("mu", mu) / 2)
    return solver.complete(x, mask, threshold, _mixing_of(x), tol, max_iter, gradient_tol)


@register("tubal")
@dataclass(frozen=True)
class TubalNuclearNorm:
    """`tubal_nuclear_norm` with its parameters."""

    dimensions: ClassVar[int] = 3
    mu: float = 1.0
    tol: float = TOLERANCE
    max_iter: int = ITERATIONS
    gradient_tol: float | None = None

    def __post_init__(self) -> None:
        check_nonnegative("mu", self.mu)
        check_stopping(self.tol, self.max_iter, self.gradient_tol)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        options = {"tol": self.tol, "max_iter": self.max_iter, "gradient_tol": self.gradient_tol}
        return tubal_nuclear_norm(x, mask, self.mu, **options)

    def solve(self, x: Tensor, mask: Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank (summed over slices) of each block."""
        filled, observed = checked(x, mask, 3)
        blocks = filled.detach().reshape(-1, *x.shape[-3:])
        threshold = blocks.new_full(blocks.shape[:1], self.mu / 2)
        found = solver.describe(
            blocks, observed.reshape(blocks.shape), threshold, _mixing_of(blocks), self.tol, self.max_iter
        )
        return found.of(x, 3)


def _mixing_of(x: Tensor) -> Tensor | None:
    return None if x.shape[1] == 1 else cosine_transform(x.shape[1]).to(x)


@functools.cache
def cosine_transform(size: int) -> Tensor:
    """The orthonormal matrix of the discrete cosine transform (type II) of `size` values."""
    order = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * order[:, None] * (order + 0.5) / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
