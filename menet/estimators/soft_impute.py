"""Soft-Impute (Mazumder et al., 2010; equation 2 of the paper)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet import linalg
from menet.estimators import solver
from menet.estimators.base import (
    FRACTION_OF_LARGEST,
    check_nonnegative,
    check_stopping,
    checked,
    estimator,
    register,
)

TOLERANCE = 1e-3
"""Gradient relative to λ at which a matrix stops: images are then within 1e-3 of the fixed point."""
ITERATIONS = 1000


@estimator(dimensions=2)
def soft_impute(
    x: Tensor,
    mask: Tensor,
    shrinkage: float | None = None,
    restore_observed: bool = True,
    *,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
    gradient_tol: float | None = None,
) -> Tensor:
    """Estimate `(..., m, n)` by minimizing  ½‖mask∘(X − x)‖² + λ‖X‖_*  over X.

    `shrinkage` is λ; by default, as in the published code, 1/50 of the largest singular value of each
    zero-filled matrix (the gradient includes its derivative). `restore_observed` puts the observed entries back
    at the end, as the published code does: observed pixels, with any adversarial perturbation in them, then pass
    unchanged. A matrix stops when the norm of its gradient is at most `tol`·λ, as in `nuclear_norm`. Where
    nothing is observed the estimate is zero. Differentiable as `nuclear_norm` is.
    """
    check_stopping(tol, max_iter, gradient_tol)
    threshold = _threshold(x, shrinkage)
    stopping = tol, max_iter, gradient_tol
    return solver.complete(x[:, None], mask[:, None], threshold, None, *stopping, restore_observed)[:, 0]


@register("soft-impute")
@dataclass(frozen=True)
class SoftImpute:
    """`soft_impute` with its parameters."""

    dimensions: ClassVar[int] = 2
    shrinkage: float | None = None
    restore_observed: bool = True
    tol: float = TOLERANCE
    max_iter: int = ITERATIONS
    gradient_tol: float | None = None

    def __post_init__(self) -> None:
        if self.shrinkage is not None:
            check_nonnegative("shrinkage", self.shrinkage)
        check_stopping(self.tol, self.max_iter, self.gradient_tol)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        options = {"tol": self.tol, "max_iter": self.max_iter, "gradient_tol": self.gradient_tol}
        return soft_impute(x, mask, self.shrinkage, self.restore_observed, **options)

    def solve(self, x: Tensor, mask: Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank of each matrix; no gradients.

        Gap and rank are those of the minimizer, before observed entries are put back.
        """
        filled, observed = checked(x, mask, 2)
        blocks = filled.detach().reshape(-1, 1, *x.shape[-2:])
        observed = observed.reshape(blocks.shape)
        threshold = _threshold(blocks[:, 0], self.shrinkage)
        found = solver.describe(blocks, observed, threshold, None, self.tol, self.max_iter)
        if self.restore_observed:
            found = found._replace(estimate=torch.where(observed, blocks, found.estimate))
        return found.of(x, 2)


def _threshold(x: Tensor, shrinkage: float | None) -> Tensor:
    if shrinkage is None:
        return linalg.largest_singular_value(x) * FRACTION_OF_LARGEST
    return x.new_full(x.shape[:1], check_nonnegative("shrinkage", shrinkage))
