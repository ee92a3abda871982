"""Soft-Impute (Mazumder et al., 2010; equation 2 of the paper)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet import linalg
from menet.estimators import solver
from menet.estimators.checks import Gradient, checked, estimator, positive, stopping

TOLERANCE = 1.5e-5
"""Relative change at which a matrix is done: on images it leaves the estimate within 1e-3 of the fixed point."""
ITERATIONS = 500
SHARE_OF_LARGEST = 1 / 50
"""The published code's λ: this share of the largest singular value of the zero-filled matrix."""


@estimator(dimensions=2)
def soft_impute(
    x: Tensor,
    mask: Tensor,
    shrinkage: float | None = None,
    restore_observed: bool = True,
    *,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
) -> Tensor:
    """Estimate `(..., m, n)` by minimising  ½‖mask∘(X − x)‖² + λ‖X‖_*  over X.

    `shrinkage` is λ; by default, as in the published code, 1/50 of the largest singular value of the zero-filled
    matrix, one for each matrix (the exact gradient follows it too). `restore_observed` puts the observed entries
    back at the end, as the published code does: kept pixels, adversarial ones among them, then pass unchanged.
    A matrix stops when a step changes it by less than `tol` of its norm. Where nothing is observed the estimate
    is zero.
    """
    stopping(tol, max_iter)
    threshold = _threshold(x, shrinkage)
    estimate = solver.complete(x[:, None], mask[:, None], threshold, None, tol, max_iter)[:, 0]
    return torch.where(mask, x, estimate) if restore_observed else estimate


@dataclass(frozen=True)
class SoftImpute:
    """`soft_impute` with its parameters."""

    dimensions: ClassVar[int] = 2
    shrinkage: float | None = None
    restore_observed: bool = True
    tol: float = TOLERANCE
    max_iter: int = ITERATIONS
    gradient: Gradient = "exact"

    def __post_init__(self) -> None:
        if self.shrinkage is not None:
            positive("shrinkage", self.shrinkage, zero=True)
        stopping(self.tol, self.max_iter)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return soft_impute(
            x,
            mask,
            self.shrinkage,
            self.restore_observed,
            tol=self.tol,
            max_iter=self.max_iter,
            gradient=self.gradient,
        )

    def solve(self, x: Tensor, mask: Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank of each matrix; no gradients.

        Gap and rank are those of the minimiser, before observed entries are put back.
        """
        filled, seen = checked(x, mask, 2)
        blocks = filled.detach().reshape(-1, 1, *x.shape[-2:])
        seen = seen.reshape(blocks.shape)
        threshold = _threshold(blocks[:, 0], self.shrinkage)
        found = solver.describe(blocks, seen, threshold, None, self.tol, self.max_iter)
        if self.restore_observed:
            found = found._replace(estimate=torch.where(seen, blocks, found.estimate))
        return found.of(x, 2)


def _threshold(x: Tensor, shrinkage: float | None) -> Tensor:
    if shrinkage is None:
        return linalg.largest_singular_value(x) * SHARE_OF_LARGEST
    return x.new_full(x.shape[:1], positive("shrinkage", shrinkage, zero=True))
