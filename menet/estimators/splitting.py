"""Douglas–Rachford splitting (Lions & Mercier, 1979): for what gradient and Newton steps do slowly, or cannot do.

Its operations are shrinking singular values and a step for each entry alone, in turns. It shrinks by a level of
its own choice, the size of the singular values instead of λ, and is less sensitive to rounding than Newton steps.

- `split_blocks`: a batch whose λ is small for the scale of the data. A small λ costs no more iterations than a
  large one.
- `split_images`: large images, whose estimates have a high rank. A Newton step on them takes several products
  with all singular vectors for each iteration of its conjugate gradients; splitting takes one decomposition per
  step, and by Anderson's acceleration (1965) needs about as many steps as Newton's method decompositions.
- `constrained`: nuclear-norm completion with bounds on every entry, weights and effects, for dense batches:

      minimize over X, a, b:   ½ Σ w·(M − A)² + λ ‖X‖_*,   M = X + a·1ᵀ + 1·bᵀ,   low ≤ M ≤ high

  Unpenalized effects are the means of rows and columns, which shrinking leaves alone; weights and bounds are no
  more than a weighted mean and a clip in the step of an entry.
"""

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from menet import linalg
from menet.errors import ConfigurationError
from menet.estimators import newton
from menet.estimators.base import (
    FRACTION_OF_LARGEST,
    ConvergenceWarning,
    Effects,
    check_effects,
    check_nonnegative,
    check_stopping,
    checked,
)

# The first level relative to the largest singular value, and the over-relaxation.
FIRST_LEVEL = 0.2
RELAXATION = 1.6
# Steps of a batch before Newton's method is tried again; the number doubles.
BLOCK_STEPS = 64
# The number of columns from which images are solved here, and the smallest and largest λ, relative to the norm of
# the matrix. With a larger one steps in a subspace are faster.
SMALLEST, SMALLEST_RATIO, LARGEST_RATIO = 224, 1e-5, 1 / 40
# Steps before Newton's method takes over, and how many of them Anderson's acceleration combines, from which on.
IMAGE_STEPS = 40
MEMORY, FIRST = 4, 2
# The level of an image is this multiple of √(λ·median singular value), and at least this multiple of λ.
LEVEL, LEAST = 2.5, 2.0
# Single precision serves while the gradient is above this multiple of the error it makes; then this many singular
# values are found apart from the others.
ROUNDING = 4.0
LEADING = 12
# Of `constrained`: its stopping rule, and how often the level is balanced and the gap computed.
GAP = 1e-3
ITERATIONS = 2000
BALANCE = 10
_TINY = 1e-300


def split_blocks(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> tuple[Tensor, ...]:
    """Splitting and Newton steps in turns until every block has converged or reached the limit.

    Returns what `solver.solve` does. The ratio of the level to λ weights the residual, and is balanced (Boyd et
    al., 2011, §3.4).
    """
    problem, scale = newton.scaled(x, mask, threshold, mixing)
    result, problem_threshold = torch.zeros_like(x), problem.threshold
    iterations = torch.full(x.shape[:1], -max_iter, dtype=torch.long, device=x.device)
    certified = torch.full_like(problem.threshold, torch.inf)
    index = torch.arange(len(x), device=x.device)
    governing, before = problem.x, problem.x
    spectrum = problem.decompose(problem.x).values.reshape(len(x), -1).amax(1)
    level = torch.maximum(FIRST_LEVEL * spectrum, problem.threshold)
    used, steps, goal = newton.FIRST_STEPS + newton.NEWTON_STEPS, BLOCK_STEPS, max(tol**2, 1e-5)
    while used < max_iter and len(index):
        for step in range(1, min(steps, max_iter - used) + 1):
            weight = (level / problem.threshold)[:, None, None, None]
            decomposition = problem.decompose(governing)
            estimate = problem.shrink(decomposition, level)
            values = (decomposition.values.reshape(len(level), -1) - level[:, None]).clamp(min=0).sum(1)
            dual = (governing - estimate) / weight
            gap = problem.gap(estimate, values, dual)
            result[index], certified[index] = estimate, gap
            done = gap <= tol**2
            iterations[index[done]] = used + step
            reflected = 2 * estimate - governing
            near = torch.lerp((reflected + weight * problem.x) / (1 + weight), reflected, problem.unseen)
            grown = torch.ones_like(level)
            if step % 8 == 0:
                primal = newton.size_of(estimate - near) / newton.size_of(estimate).clamp(min=newton.TINY)
                change = newton.size_of(near - before) / newton.size_of(governing - estimate).clamp(
                    min=newton.TINY
                )
                grown = torch.where(primal > 2 * change, 0.5, torch.where(change > 2 * primal, 2.0, grown))
                grown = torch.maximum(grown, problem.threshold / level)
            moved = governing + RELAXATION * (near - estimate)
            factor = grown[:, None, None, None]
            governing = torch.where(factor == 1, moved, estimate + factor * (governing - estimate))
            level, before = level * grown, near
            if bool(done.any()):
                stays = ~done
                problem, index, level = problem.of(stays), index[stays], level[stays]
                governing, before, estimate, gap = governing[stays], before[stays], estimate[stays], gap[stays]
            if not len(index) or bool((gap <= goal).all()):
                break
        used += step
        if used >= max_iter or not len(index):
            break
        limit = min(newton.NEWTON_STEPS, max_iter - used)
        estimate, taken = newton.newton(problem, problem.fill(estimate), tol, limit)
        done, stays = taken > 0, taken == 0
        result[index[done]], iterations[index[done]] = estimate[done], used + taken[done]
        certified[index[done]] = torch.inf
        problem, index, level = problem.of(stays), index[stays], level[stays]
        governing, before = governing[stays], before[stays]
        used, steps, goal = used + limit, 2 * steps, tol**2
    # A λ that was raised to `SMALLEST` is another problem.
    raised = problem_threshold > threshold / scale[:, 0, 0, 0]
    return result * scale, iterations, torch.where(raised, torch.inf, certified)


def split_images(
    x: Tensor, mask: Tensor, threshold: Tensor, tol: float, max_iter: int, keep: bool
) -> tuple[Tensor, ...]:
    """Blocks of one slice, one after another; iterations are 0 where splitting did not converge.

    With `keep` also what the compiled adjoint needs, as from `solver.solve`.
    """
    problem, scale = newton.scaled(x, mask, threshold, None)
    each = [torch.tensor([number], device=x.device) for number in range(len(x))]
    found = [_split_image(problem.of(number), tol, max_iter) for number in each]
    estimate = torch.stack([one.estimate for one in found])[:, None] * scale
    missed = -max_iter if max_iter <= IMAGE_STEPS else 0
    iterations = torch.tensor([one.iterations or missed for one in found], device=x.device)
    if not keep:
        return estimate, iterations
    filled, values, vectors = (torch.stack(parts) for parts in zip(*(one[2:] for one in found), strict=True))
    return estimate, iterations, filled[:, None], values, vectors.mT.contiguous(), problem.threshold


class _Split(NamedTuple):
    """The estimate of one matrix, the steps (0 where they did not suffice), and what the adjoint needs."""

    estimate: Tensor
    iterations: int
    filled: Tensor
    values: Tensor
    vectors: Tensor


class _Past:
    """The last steps of an iteration, as Anderson's acceleration uses them."""

    def __init__(self, like: Tensor) -> None:
        self.turns = like.new_empty(MEMORY, like.numel())
        self.moved = torch.empty_like(self.turns)
        self.gram = torch.zeros(MEMORY, MEMORY, dtype=torch.float64)
        self.count = 0
        self.last: tuple[Tensor, Tensor] | None = None

    def combined(self, point: Tensor, step: Tensor) -> Tensor:
        """The combination of the last points, each where a step has led, whose step were shortest if linear."""
        now = point.flatten(), step.flatten()
        before, self.last = self.last, now
        if before is None:
            return point
        place, self.count = self.count % MEMORY, self.count + 1
        known = slice(min(self.count, MEMORY))
        torch.sub(now[0], before[0], out=self.moved[place])
        turn = torch.sub(now[1], before[1], out=self.turns[place])
        self.gram[place, known] = self.gram[known, place] = (self.turns[known] @ turn).double().cpu()
        gram, side = self.gram[known, known], (self.turns[known] @ now[1]).double().cpu()
        ridge = 1e-8 * gram.diagonal().max().clamp(min=newton.TINY) * torch.eye(len(gram))
        weights = torch.linalg.solve(gram + ridge, side).to(point)
        return torch.addmv(now[0], self.moved[known].T, weights, alpha=-1).view_as(point)


def _split_image(problem: newton.Problem, tol: float, max_iter: int) -> _Split:
    """Solve the problem of one tall matrix until its gradient is at most `tol`·λ, as `solver.complete` promises.

    With X = S_τ(G) for the governing matrix G and the level τ = wλ, Y = (G − X)/w is a subgradient of λ‖X‖_* at
    X. S_λ(X + Y) is X, and S_λ is nonexpansive, so the gradient at X is at most the distance from Y to the
    observed residual: that needs no further decomposition.
    """
    x, seen, threshold = problem.x[0, 0], 1 - problem.unseen[0, 0], float(problem.threshold[0])
    filled = problem.fill(newton.local_average(problem.x, problem.unseen == 0))[0, 0]
    values, vectors = _decompose(filled)
    estimate = _shrunk(filled, values, vectors, threshold)
    weight = max(LEAST, LEVEL * math.sqrt(float(values.median()) / threshold))
    level, ahead = weight * threshold, weight / (1 + weight)
    governing = torch.lerp(estimate, filled, weight)
    # What the precision of a Gram matrix of norm 1 makes of it, as a change of the estimate.
    eps = 0.0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps
    rounding = eps * math.sqrt(len(values)) / (2 * level)
    error, deflate, double = rounding * float(values[-1]) ** 2, False, False
    past = _Past(x)
    taken, limit = 0, min(IMAGE_STEPS, max_iter - 1)
    for step in range(1, limit + 1):
        if deflate:
            values, vectors, norm, missed = _deflated(governing, vectors)
            error = rounding * norm + missed
            double = double or rounding * norm > 0.5 * tol * threshold
        if double:
            values, vectors = _decompose(governing.double())
            error, deflate = 0.0, False
        elif not deflate:
            values, vectors = _decompose(governing)
        estimate = _shrunk(governing, values, vectors, level)
        rest = governing - estimate
        misfit = (x - estimate).mul_(seen)
        gradient = float(torch.linalg.vector_norm(torch.sub(misfit, rest, alpha=1 / weight)))
        if gradient + error <= tol * threshold:
            taken = step + 1
            break
        deflate = not double and (deflate or gradient <= max(ROUNDING * error, tol * threshold))
        # The proximal step of the misfit at the reflected point, minus the estimate.
        move = misfit.addcmul_(seen, rest).mul_(ahead).sub_(rest).mul_(RELAXATION)
        governing = governing + move
        if step > FIRST:
            governing = past.combined(governing, move)
    filled = torch.add(estimate, rest, alpha=1 / weight)
    values = (values - level).clamp(min=0) + values.clamp(max=level) / weight
    return _Split(estimate, taken, filled, values.to(x.dtype), vectors.to(x.dtype))


def _decompose(x: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, ascending, and right singular vectors, from the Gram matrix in the precision of `x`."""
    squares, vectors = torch.linalg.eigh(_gram(x))
    return squares.clamp(min=0).sqrt(), vectors


def _gram(x: Tensor) -> Tensor:
    """xᵀx in its lower triangle, which is what `eigh` reads; parts of the other are zero."""
    gram, size = x.new_zeros(x.shape[1], x.shape[1]), -(-x.shape[1] // 4)
    for start in range(0, len(gram), size):
        rows = slice(start, start + size)
        torch.mm(x[:, rows].mT, x[:, : start + size], out=gram[rows, : start + size])
    return gram


def _deflated(x: Tensor, near: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """The same with the leading singular values apart: `near` has vectors of a matrix close to `x`.

    The Gram matrix rounds off singular values that are small for the largest, which images have a few of: those
    come from a subspace iteration, and the Gram matrix from the rest, which saves double precision. Returns also
    its norm, and how far the sum of both parts is from `x`.
    """
    left = torch.linalg.qr(x @ near[:, -2 * LEADING :].to(x.dtype)).Q
    left = torch.linalg.qr(x @ (x.mT @ left)).Q
    turn, large, right = torch.linalg.svd(left.mT @ x, full_matrices=False)
    norm = 2 * float(large[LEADING]) ** 2
    left, large, right = left @ turn[:, :LEADING], large[:LEADING], right[:LEADING]
    rest = torch.addmm(x, left * large, right, alpha=-1)
    coupling = rest @ right.mT
    rest.addmm_(coupling, right, alpha=-1)
    # The directions of the large ones are lifted above all others, which are then orthogonal to them.
    squares, vectors = torch.linalg.eigh(_gram(rest).addmm_(right.mT, right, alpha=norm))
    values = squares.clamp(min=0).sqrt()
    values[-LEADING:], vectors[:, -LEADING:] = large.flip(0), right.flip(0).mT
    return values, vectors, norm, float(torch.linalg.vector_norm(coupling))


def _shrunk(x: Tensor, values: Tensor, vectors: Tensor, level: float) -> Tensor:
    kept = vectors[:, int((values <= level).sum()) :].to(x.dtype)
    ratio = (1 - level / values[len(values) - kept.shape[1] :]).to(x.dtype)
    (rows, columns), rank = x.shape, len(ratio)
    # The order of the products that takes fewer operations.
    if 2 * rows * rank < columns * (rows + rank):
        return (x @ kept) @ (kept * ratio).mT
    return x @ ((kept * ratio) @ kept.mT)


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
        return _split_within(flat, precision, threshold, low, high, axes, tol, max_iter)

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


def _split_within(
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
