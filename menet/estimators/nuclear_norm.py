"""Nuclear-norm minimisation, the paper's method unless it says otherwise."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from menet.estimators import solver
from menet.estimators.checks import Gradient, checked, estimator, positive, stopping

TOLERANCE = 5e-4
"""Relative change at which a matrix is done: on images it leaves the objective within 1e-4 of its minimum."""
ITERATIONS = 200


@estimator(dimensions=2)
def nuclear_norm(
    x: Tensor, mask: Tensor, mu: float = 1.0, *, tol: float = TOLERANCE, max_iter: int = ITERATIONS
) -> Tensor:
    """Estimate `(..., m, n)` by minimising  mu·‖X‖_* + ‖mask∘(X − x)‖²  over X.

    This is the problem the published code gives a cone solver, with mu = 1 on the scale [-1, 1]. A matrix stops
    when a step changes it by less than `tol` of its norm, or after `max_iter` steps. With mu = 0 observed entries
    are kept and the others hold the local average the iteration starts from; where nothing is observed the
    estimate is zero. `gradient="exact"` differentiates the minimiser, `"bpda"` passes gradients unchanged.
    """
    threshold = _threshold(x, mu)
    stopping(tol, max_iter)
    return solver.complete(x[:, None], mask[:, None], threshold, None, tol, max_iter)[:, 0]


@dataclass(frozen=True)
class NuclearNorm:
    """`nuclear_norm` with its parameters."""

    dimensions: ClassVar[int] = 2
    mu: float = 1.0
    tol: float = TOLERANCE
    max_iter: int = ITERATIONS
    gradient: Gradient = "exact"

    def __post_init__(self) -> None:
        positive("mu", self.mu, zero=True)
        stopping(self.tol, self.max_iter)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return nuclear_norm(x, mask, self.mu, tol=self.tol, max_iter=self.max_iter, gradient=self.gradient)

    def solve(self, x: Tensor, mask: Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank of each matrix; no gradients."""
        filled, seen = checked(x, mask, 2)
        blocks = filled.detach().reshape(-1, 1, *x.shape[-2:])
        found = solver.describe(
            blocks, seen.reshape(blocks.shape), _threshold(blocks, self.mu), None, self.tol, self.max_iter
        )
        return found.of(x, 2)


def _threshold(x: Tensor, mu: float) -> Tensor:
    # mu‖X‖_* + ‖·‖² is twice (mu/2)‖X‖_* + ½‖·‖².
    return x.new_full(x.shape[:1], positive("mu", mu, zero=True) / 2)
