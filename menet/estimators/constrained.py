"""Nuclear-norm completion with bounds on every entry of the estimate, weights and effects, for dense batches.

    minimize over X, a, b:   ½ Σ w·(M − A)² + λ ‖X‖_*,   M = X + a·1ᵀ + 1·bᵀ,   low ≤ M ≤ high

Two operations suffice, in turns (Douglas–Rachford splitting, in the form of Boyd et al., 2011): shrinking the
singular values of the centered matrix, where unpenalized effects are the means of rows and columns, and a step
for each entry alone, where weights and bounds are no more than a weighted mean and a clip.
"""

import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from menet import linalg
from menet.errors import ConfigurationError
from menet.estimators.base import check_nonnegative, check_stopping, checked
from menet.estimators.large import Effects, check_effects
from menet.estimators.soft_impute import FRACTION_OF_LARGEST
from menet.estimators.solver import ConvergenceWarning

GAP = 1e-3
ITERATIONS = 2000
# The first threshold relative to the largest singular value, how often it is balanced, and how often the gap is
# computed.
FIRST_LEVEL = 0.2
BALANCE = 10
_TINY = 1e-300


class Constrained(NamedTuple):
    """The estimate, within bounds, and for each matrix the iterations and the relative duality gap."""

    estimate: Float[Tensor, "*batch m n"]
    iterations: Tensor
    gap: Tensor


def constrained(
    x: Float[Tensor, "*batch m n"],
    mask: Tensor,
    shrinkage: float | None = None,
    *,
    bounds: tuple[float, float],
    weights: Tensor | None = None,
    effects: Effects = "none",
    tol: float = GAP,
    max_iter: int = ITERATIONS,
) -> Constrained:
    """Estimate `(..., m, n)` with every entry within `bounds` (low, high), both finite.

    `shrinkage` is λ, by default 1/50 of the largest singular value of each zero-filled matrix; with 0 any matrix
    within the bounds that agrees with the data is a minimum. `weights` broadcasts to `x` and is the precision of
    each observation; zero means unobserved. `effects` ("rows", "columns", "both") are unpenalized. Stops at a
    relative duality gap of `tol`, or with a `ConvergenceWarning` after `max_iter` iterations. Without bounds, or
    for large matrices, take `complete`. No gradients.
    """
    check_stopping(tol, max_iter, None)
    check_effects(effects)
    low, high = (float(bound) for bound in bounds)
    if not -float("inf") < low <= high < float("inf"):
        raise ConfigurationError(f"expected finite bounds (low, high) with low <= high, got {bounds}")
    filled, observed = checked(x.detach(), mask, 2)
    precision = observed.double()
    if weights is not None:
        if not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ConfigurationError("expected finite weights >= 0, got a negative or non-finite one")
        try:
            precision = precision * weights.detach().expand(x.shape)
        except RuntimeError:
            raise ConfigurationError(
                f"expected weights that broadcast to the shape {tuple(x.shape)} of x, got {tuple(weights.shape)}"
            ) from None
    flat = filled.double().reshape(-1, *x.shape[-2:])
    precision = precision.reshape(flat.shape)
    flat = flat * (precision > 0)
    if shrinkage is None:
        threshold = linalg.largest_singular_value(flat) * FRACTION_OF_LARGEST
    else:
        threshold = flat.new_full(flat.shape[:1], check_nonnegative("shrinkage", shrinkage))
    turned = x.shape[-1] > x.shape[-2]
    axes = {"none": (), "rows": (2,), "columns": (1,), "both": (1, 2)}[effects]
    if turned:
        axes = tuple(3 - axis for axis in axes)

    def solve(flat: Tensor, precision: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        return _split(flat, precision, threshold, low, high, axes, tol, max_iter)

    estimate, iterations, gap = linalg.in_chunks(
        solve, [linalg.tall(flat).contiguous(), linalg.tall(precision).contiguous(), threshold]
    )
    if missed := int((gap > tol).sum()):
        warnings.warn(
            f"{missed} of {len(gap)} matrices did not converge in {max_iter} iterations; "
            "raise max_iter, or loosen tol",
            ConvergenceWarning,
            stacklevel=2,
        )
    estimate = (estimate.mT if turned else estimate).reshape(x.shape).to(x.dtype)
    # Rounding to a lower precision must not leave the bounds.
    batch = x.shape[:-2]
    return Constrained(estimate.clamp(low, high), iterations.reshape(batch), gap.reshape(batch))


def _split(
    x: Tensor,
    weights: Tensor,
    threshold: Tensor,
    low: float,
    high: float,
    axes: tuple[int, ...],
    tol: float,
    max_iter: int,
) -> tuple[Tensor, ...]:
    """Solve one chunk: estimates, iterations, gaps."""
    result, gaps = torch.zeros_like(x), torch.full_like(threshold, torch.inf)
    iterations = torch.full(x.shape[:1], max_iter, dtype=torch.long, device=x.device)
    index = torch.arange(len(x), device=x.device)
    # λ = 0 leaves nothing to shrink; a tiny one has the same minimum to all digits.
    norm = linalg.spectral_norm(x).clamp(min=1e-12)
    threshold = torch.maximum(threshold, 1e-9 * norm)
    penalty = threshold / torch.maximum(FIRST_LEVEL * norm, threshold)
    near, dual = x.clamp(low, high), torch.zeros_like(x)
    for step in range(1, max_iter + 1):
        rho = penalty[:, None, None]
        target = near - dual / rho
        centered = _centered(target, axes)
        shrunk = linalg.shrink(linalg.decompose(centered), threshold / penalty)
        model = target - centered + shrunk
        # Minus this is a subgradient of the penalty at the model: centered, of spectral norm at most λ.
        feasible = dual + rho * (model - near)
        ahead = model + dual / rho
        moved = ((weights * x + rho * ahead) / (weights + rho)).clamp(low, high)
        change, apart = _size(moved - near) * penalty, _size(model - moved)
        dual, near = dual + rho * (model - moved), moved
        if step % BALANCE and step < max_iter:
            continue
        primal = _misfit(near, x, weights) + threshold * _nuclear(_centered(near, axes))
        best = torch.where(
            weights > 0, x + feasible / weights.clamp(min=_TINY), torch.where(feasible > 0, high, low)
        )
        best = best.clamp(low, high)
        bound = _misfit(best, x, weights) - (feasible * best).sum((1, 2))
        gap = (primal - bound).clamp(min=0) / primal.clamp(min=_TINY)
        result[index], gaps[index], iterations[index] = near, gap, step
        stays = gap > tol
        if not bool(stays.any()):
            break
        # Balanced where one of the two residuals leads (Boyd et al., §3.4.1).
        primal_part, dual_part = apart / _size(model).clamp(min=_TINY), change / _size(dual).clamp(min=_TINY)
        factor = torch.where(primal_part > 3 * dual_part, 2.0, torch.where(dual_part > 3 * primal_part, 0.5, 1.0))
        penalty = penalty * factor
        index, x, weights, threshold = index[stays], x[stays], weights[stays], threshold[stays]
        penalty, near, dual = penalty[stays], near[stays], dual[stays]
    return result, iterations, gaps


def _centered(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis in axes:
        x = x - x.mean(axis, keepdim=True)
    return x


def _misfit(estimate: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    return (weights * (estimate - x).square()).sum((1, 2)) / 2


def _nuclear(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x).sum(-1)


def _size(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2))
