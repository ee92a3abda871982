"""Nuclear-norm minimization, the paper's method unless it says otherwise, and its extension to tensors.

The authors name tensor completion, with channels as a third dimension, as a promising extension. The tubal
nuclear norm (Zhang et al., 2014) transforms the channels and sums the nuclear norms of the transformed slices, so
that structure shared by the channels counts once. A real orthogonal transform instead of Fourier's, here the
discrete cosine transform, keeps everything real (Kernfeld et al., 2015).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from menet import linalg
from menet.estimators import solver
from menet.estimators.base import check_nonnegative, check_stopping, checked, estimator, register

TOLERANCE = 0.02
"""Gradient relative to λ at which a matrix stops: on images the objective is then within 1e-4 of its minimum."""
ITERATIONS = 1000


@estimator(dimensions=2)
def nuclear_norm(
    x: Tensor,
    mask: Tensor,
    mu: float = 1.0,
    *,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
    gradient_tol: float | None = None,
) -> Tensor:
    """Estimate `(..., m, n)` by minimizing  mu·‖X‖_* + ‖mask∘(X − x)‖²  over X.

    This is the problem that the published code gives to a cone solver, with mu = 1 on the scale [-1, 1]. A
    matrix stops when the norm of its gradient is at most `tol`·mu/2 (or its relative duality gap at most `tol`²),
    which leaves the objective within about `tol`² of its minimum at every scale of `x` and mu. After `max_iter`
    steps a `ConvergenceWarning` says how many matrices did not. A mu below 1e-9 of the norm of `x` is taken as
    that. With mu = 0 observed entries are kept and the others are the local average that the iteration starts
    from; where nothing is observed the estimate is zero. Differentiable by the implicit function theorem at the
    minimizer; `gradient_tol` is the relative residual of that linear system, by default 1e-3 in single and 1e-10
    in double precision.
    """
    threshold = _threshold(x, mu)
    check_stopping(tol, max_iter, gradient_tol)
    return solver.complete(x[:, None], mask[:, None], threshold, None, tol, max_iter, gradient_tol)[:, 0]


@register("nuclear-norm")
@dataclass(frozen=True)
class NuclearNorm:
    """`nuclear_norm` with its parameters."""

    dimensions: ClassVar[int] = 2
    mu: float = 1.0
    tol: float = TOLERANCE
    max_iter: int = ITERATIONS
    gradient_tol: float | None = None

    def __post_init__(self) -> None:
        check_nonnegative("mu", self.mu)
        check_stopping(self.tol, self.max_iter, self.gradient_tol)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        options = {"tol": self.tol, "max_iter": self.max_iter, "gradient_tol": self.gradient_tol}
        return nuclear_norm(x, mask, self.mu, **options)

    def solve(self, x: Tensor, mask: Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank of each matrix; no gradients."""
        filled, observed = checked(x, mask, 2)
        blocks = filled.detach().reshape(-1, 1, *x.shape[-2:])
        found = solver.describe(
            blocks, observed.reshape(blocks.shape), _threshold(blocks, self.mu), None, self.tol, self.max_iter
        )
        return found.of(x, 2)


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
    threshold = _threshold(x, mu)
    return solver.complete(x, mask, threshold, _mixing_of(x), tol, max_iter, gradient_tol)


@register("tubal")
@dataclass(frozen=True)
class TubalNuclearNorm(NuclearNorm):
    """`tubal_nuclear_norm` with its parameters, which are those of `NuclearNorm`."""

    dimensions: ClassVar[int] = 3

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        options = {"tol": self.tol, "max_iter": self.max_iter, "gradient_tol": self.gradient_tol}
        return tubal_nuclear_norm(x, mask, self.mu, **options)

    def solve(self, x: Tensor, mask: Tensor) -> solver.Solution:
        """The estimate with the iterations, duality gap and rank (summed over slices) of each block."""
        filled, observed = checked(x, mask, 3)
        blocks = filled.detach().reshape(-1, *x.shape[-3:])
        threshold = _threshold(blocks, self.mu)
        found = solver.describe(
            blocks, observed.reshape(blocks.shape), threshold, _mixing_of(blocks), self.tol, self.max_iter
        )
        return found.of(x, 3)


def _threshold(x: Tensor, mu: float) -> Tensor:
    # mu‖X‖_* + ‖·‖² is twice (mu/2)‖X‖_* + ½‖·‖².
    return x.new_full(x.shape[:1], check_nonnegative("mu", mu) / 2)


def _mixing_of(x: Tensor) -> Tensor | None:
    return None if x.shape[1] == 1 else linalg.cosine_transform(x.shape[1]).to(x)
