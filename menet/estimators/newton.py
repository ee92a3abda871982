"""Newton's method for the convex problem of `solver.py`, on batches of blocks in torch, and where it starts.

A few accelerated gradient steps find the rank; Newton's method on the unobserved entries, by conjugate gradients,
then needs two or three steps. With the same Hessian the minimizer is differentiated. `kernels/completion.py` has
all of this compiled.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from menet import linalg

# Gradient steps before the first Newton step, and Newton steps before the splitting.
FIRST_STEPS = 4
NEWTON_STEPS = 60
# Conjugate gradients may be inexact inside Newton's method: their relative residual far from the goal and close
# to it, and how many times `tol`·λ is far.
NEWTON_ITERATIONS = 30
FORCING = (0.25, 0.1, 20.0)
# The initial damping, and its factors after a step that lowered the gradient and one that did not.
DAMPING = (4.0, 0.5, 8.0)
# The initial damping after gradient steps from a local average, which is further from the minimum.
COLD_DAMPING = 16.0
# Momentum starts as if some steps had been taken: the initial estimate is good, so its direction can be trusted.
FIRST_MOMENTUM = 2.0
# The initial estimate of a table: its rank, its first λ relative to the largest singular value, the factor by
# which that falls, and the steps once it has its value.
START_RANK = 16
START_LEVEL = 0.25
START_FALL = 0.5
START_STEPS = 5
# The compiled loop goes on to the minimum in a subspace of up to so many directions, and so many steps. It is
# tried on tables, and on images where λ is at least this fraction of the norm of the matrix.
LARGEST_SUBSPACE = 128
LOW_RANK_STEPS = 40
LOW_RANK = 1 / 200
# These steps stop as soon as they may, Newton's far below their tolerance: a third of it makes both as exact.
LOW_RANK_TOLERANCE = 0.3
SMOOTH_ROWS = 64
# A smaller λ, relative to the norm of the matrix, is taken as this: double precision does not resolve less.
SMALLEST = 1e-9
# The adjoint's conjugate gradients.
ADJOINT_ITERATIONS = 500
TINY = 1e-30


class Problem(NamedTuple):
    """Blocks to solve, as the minimization of a smooth function of the unobserved entries u.

    The function is the minimum over X of ½‖X − z‖² + λ‖X‖_*, where z = A + u is the *filled* matrix, reached at
    X = S(z) with S the shrinkage. Its gradient u − unseen∘S(z) is 1-Lipschitz, its Hessian I − unseen∘J with J
    the derivative of S.
    """

    x: Tensor
    unseen: Tensor
    threshold: Tensor
    mixing: Tensor | None

    def of(self, chosen: Tensor) -> "Problem":
        return Problem(self.x[chosen], self.unseen[chosen], self.threshold[chosen], self.mixing)

    def fill(self, estimate: Tensor) -> Tensor:
        """A with the estimate at its unobserved entries; a gradient step if the estimate is S(z)."""
        return torch.addcmul(self.x, self.unseen, estimate)

    def decompose(self, filled: Tensor) -> linalg.Decomposition:
        return linalg.decompose(slices(filled, self.mixing))

    def shrink(self, decomposition: linalg.Decomposition, level: Tensor | None = None) -> Tensor:
        """S(z) of the decomposed z, by λ or by another level."""
        return _blocks(linalg.shrink(decomposition, self._of_slices(level)), self.x.shape, self.mixing)

    def shrink_nearby(self, filled: Tensor, vectors: Tensor) -> Tensor:
        """S(z) to first order, by the right singular vectors of a matrix nearby."""
        found = linalg.shrink_nearby(slices(filled, self.mixing), vectors, self._of_slices())
        return _blocks(found, self.x.shape, self.mixing)

    def derivative(self, decomposition: linalg.Decomposition) -> "_Derivative":
        """The derivative of S at the decomposed z."""
        return _Derivative(linalg.shrink_derivative(decomposition, self._of_slices()), self.mixing)

    def gap(self, estimate: Tensor, nuclear: Tensor, dual: Tensor) -> Tensor:
        """The relative duality gap of an estimate with that nuclear norm.

        `dual` has a spectral norm of at most λ. Its observed part may exceed λ by the norm of the rest, and is
        scaled to be feasible.
        """
        misfit = ((self.x - estimate) * (1 - self.unseen)).square().sum((1, 2, 3)) / 2
        primal = misfit + self.threshold * nuclear
        scale = self.threshold / (self.threshold + size_of(dual * self.unseen)).clamp(min=TINY)
        dual = dual * (1 - self.unseen)
        value = scale * (dual * self.x).sum((1, 2, 3)) - scale.square() * dual.square().sum((1, 2, 3)) / 2
        return (primal - value) / primal.clamp(min=TINY)

    def _of_slices(self, level: Tensor | None = None) -> Tensor:
        return (self.threshold if level is None else level).repeat_interleave(self.x.shape[1])


class _Derivative(NamedTuple):
    """The derivative of the shrinkage of blocks, from that of their slices."""

    spectral: linalg.SpectralDerivative
    mixing: Tensor | None

    def __call__(self, direction: Tensor) -> Tensor:
        return _blocks(self.spectral(slices(direction, self.mixing)), direction.shape, self.mixing)


def slices(blocks: Tensor, mixing: Tensor | None) -> Tensor:
    """Blocks as one batch of matrices, their channels mixed, as `linalg` takes them."""
    if mixing is not None:
        blocks = torch.einsum("dc,bcnm->bdnm", mixing, blocks)
    return blocks.flatten(0, 1)


def _blocks(slices: Tensor, shape: torch.Size, mixing: Tensor | None) -> Tensor:
    """The inverse of `slices`."""
    blocks = slices.reshape(shape)
    return blocks if mixing is None else torch.einsum("dc,bdnm->bcnm", mixing, blocks)


def scaled(x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None) -> tuple["Problem", Tensor]:
    """The problem in units of a power of two close to the largest entry of each block, and these units."""
    scale = linalg.power_of_two(x, (1, 2, 3))
    problem = Problem(x / scale, (~mask).to(x.dtype), threshold / scale[:, 0, 0, 0], mixing)
    small = torch.maximum(problem.threshold, SMALLEST * whole_norm(problem))
    return problem._replace(threshold=torch.where(problem.threshold > 0, small, 0)), scale


def whole_norm(problem: "Problem") -> Tensor:
    """The norm of the whole matrix, if its unobserved entries are as large as the others."""
    seen = (1 - problem.unseen).mean((1, 2, 3)).clamp(min=1 / problem.x[0].numel())
    return size_of(problem.x) / seen.sqrt()


def local_average(x: Tensor, mask: Tensor) -> Tensor:
    """The initial estimate: each entry the mean of the observed ones in its 3×3 neighborhood.

    Neighboring pixels are similar, so this saves a third of the iterations on images; the problem is convex, so
    nothing else depends on it. Where no neighbor is observed it is the mean of the matrix.
    """
    seen = mask.to(x.dtype)
    mean = x.sum((-2, -1), keepdim=True) / seen.sum((-2, -1), keepdim=True).clamp(min=1)
    # A little of the mean is mixed in, which also decides the entries with no observed neighbor.
    return (_neighborhood_sum(x) + 0.1 * mean) / (_neighborhood_sum(seen) + 0.1)


def _neighborhood_sum(x: Tensor) -> Tensor:
    # Sums of slices: torch's average pooling takes five times as long on a CPU.
    padded = functional.pad(x, (1, 1, 1, 1))
    rows = padded[..., :-2, :] + padded[..., 1:-1, :] + padded[..., 2:, :]
    return rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]


def smooth(x: Tensor, mask: Tensor) -> Tensor:
    """Whether the neighbors of an observed entry tell most of it, as in an image; by some rows in the middle."""
    first = max(0, (x.shape[-2] - SMOOTH_ROWS) // 2)
    x, mask = x[..., first : first + SMOOTH_ROWS, :], mask[..., first : first + SMOOTH_ROWS, :]
    seen = mask.to(x.dtype)
    others = _neighborhood_sum(seen) - seen
    mean = x.sum((1, 2, 3), keepdim=True) / seen.sum((1, 2, 3), keepdim=True).clamp(min=1)
    nearby = (_neighborhood_sum(x) - x) / others.clamp(min=1)
    told = seen * (others > 0)
    error, spread = ((x - nearby) * told).square(), ((x - mean) * told).square()
    return error.sum((1, 2, 3)) < 0.5 * spread.sum((1, 2, 3))


def low_rank(x: Tensor, mask: Tensor, threshold: Tensor) -> Tensor:
    """An initial estimate of rank at most `START_RANK`, by gradient steps while λ falls to its value.

    Tables have no neighborhoods. Their leading singular vectors are found within a subspace that is improved by
    one power iteration in each step, so that a step costs a hundredth of a decomposition; what it misses below
    is left to Newton's method.
    """
    problem, scale = scaled(x, mask, threshold, None)
    x, unseen, goal = problem.x[:, 0], problem.unseen[:, 0], problem.threshold
    random = torch.Generator().manual_seed(0)
    sketch = torch.randn(x.shape[-1], min(START_RANK, x.shape[-1]), generator=random, dtype=x.dtype).to(x.device)
    basis = _orthonormal(x.mT @ (x @ sketch))
    filled, before, shrunk, momentum, left = x, torch.zeros_like(x), x, 1.0, START_STEPS
    level = torch.full_like(goal, torch.inf)
    while left > 0:
        image = filled @ basis
        squares, vectors = linalg.eigh(image.mT @ image)
        values = squares.clamp(min=0).sqrt()
        level = torch.maximum(goal, torch.minimum(START_FALL * level, START_LEVEL * values[:, -1]))
        fraction = 1 - level[:, None] / torch.maximum(values, level[:, None]).clamp(min=TINY)
        shrunk = (image @ ((vectors * fraction[:, None, :]) @ vectors.mT)) @ basis.mT
        # Of about unit length, so that weak directions are not lost beside strong ones.
        length = torch.maximum(values, 1e-4 * values[:, -1:]).clamp(min=TINY)[:, None, :]
        basis = _orthonormal(filled.mT @ (image @ (vectors / length)) / length)
        grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        ahead = torch.lerp(before, shrunk, 1 + (momentum - 1) / grown)
        filled, before, momentum = torch.addcmul(x, unseen, ahead), shrunk, grown
        left -= bool((level <= goal).all())
    return shrunk[:, None] * scale


def _orthonormal(x: Tensor) -> Tensor:
    """A basis of the columns of each matrix, by Cholesky factors: they are few and far from dependent."""
    gram = x.mT @ x
    ridge = gram.diagonal(dim1=1, dim2=2).amax(1).clamp(min=TINY) * 1e-6
    factor = torch.linalg.cholesky_ex(gram + ridge[:, None, None] * torch.eye(gram.shape[-1]).to(gram))[0]
    return torch.linalg.solve_triangular(factor, x.mT, upper=False).mT


def accelerate(problem: Problem, filled: Tensor, steps: int) -> Tensor:
    """Gradient steps with Nesterov momentum, restarted when it points uphill (O'Donoghue & Candès, 2015).

    Only the first one decomposes: these steps make a start for Newton's method, which need not be exact.
    """
    if not steps:
        return filled
    point, previous = filled, filled
    first = problem.decompose(filled)
    momentum = filled.new_full((len(filled), 1, 1, 1), FIRST_MOMENTUM)
    for step in range(steps):
        shrunk = problem.shrink_nearby(point, first.vectors) if step else problem.shrink(first)
        filled = problem.fill(shrunk)
        moved = filled - previous
        uphill = (_dot(point - filled, moved) > 0).to(momentum.dtype)
        momentum = torch.lerp(momentum, torch.ones_like(momentum), uphill)
        grown = (1 + (1 + 4 * momentum * momentum).sqrt()) / 2
        point = torch.addcmul(filled, (momentum - 1) / grown, moved)
        previous, momentum = filled, grown
    return filled


def newton(
    problem: Problem, filled: Tensor, tol: float, steps: int, first: float = DAMPING[0]
) -> tuple[Tensor, Tensor]:
    """Newton steps by conjugate gradients: estimates, and the step at which each converged, or 0.

    Where a step did not lower the gradient, it is undone and the next one damped more (Levenberg–Marquardt);
    `first` is the initial damping. Work is spent on the remaining blocks only.
    """
    estimates = torch.empty_like(filled)
    taken = torch.zeros(len(filled), dtype=torch.long, device=filled.device)
    index = torch.arange(len(filled), device=filled.device)
    rounding = 4 * torch.finfo(filled.dtype).eps
    _, less, more = DAMPING
    damping = torch.full_like(problem.threshold, first)
    before = torch.full_like(problem.threshold, torch.inf)
    last_shrunk, last_stepped = filled, filled
    for step in range(1, steps + 1):
        decomposition = problem.decompose(filled)
        shrunk = problem.shrink(decomposition)
        stepped = problem.fill(shrunk)
        downhill = stepped - filled
        size, length = size_of(downhill), size_of(shrunk).clamp(min=TINY)
        finished = size <= rounding * length
        worse = ~((size < before) | finished)
        done = finished | (~worse & (size <= tol * problem.threshold))
        damping = damping * torch.where(worse, more, less)
        undone = worse[:, None, None, None]
        last_shrunk = torch.where(undone, last_shrunk, shrunk)
        last_stepped = torch.where(undone, last_stepped, stepped)
        before = torch.where(worse, before, size)
        taken[index[done]] = step
        leaves = torch.ones_like(done) if step == steps else done
        if bool(leaves.any()):
            estimates[index[leaves]] = last_shrunk[leaves]
            stays = ~leaves
            index, problem, damping, before = index[stays], problem.of(stays), damping[stays], before[stays]
            if not len(index):
                break
            decomposition = decomposition.of(stays.repeat_interleave(problem.x.shape[1]))
            filled, downhill, undone = filled[stays], downhill[stays], undone[stays]
            last_shrunk, last_stepped = last_shrunk[stays], last_stepped[stays]
            size, length = size[stays], length[stays]
        # Far from the minimum the Hessian is damped in proportion to the gradient.
        added = (damping * size / length)[:, None, None, None]
        derivative = problem.derivative(decomposition)
        loose, tight, far = FORCING
        precision = torch.where(size > far * tol * problem.threshold, loose, tight)[:, None, None, None]
        ahead = filled + solve_hessian(derivative, problem.unseen, downhill, NEWTON_ITERATIONS, precision, added)
        # Undone to the gradient step that the Newton step was to improve.
        filled = torch.where(undone, last_stepped, ahead)
    return estimates, taken


def solve_hessian(
    derivative: _Derivative,
    unseen: Tensor,
    target: Tensor,
    max_iter: int,
    precision: Tensor | float,
    damping: Tensor | float = 0.0,
) -> Tensor:
    """Solve ((1 + damping)I − unseen∘J) v = target on the unobserved entries, by conjugate gradients."""
    tiny, eps = torch.finfo(target.dtype).tiny, torch.finfo(target.dtype).eps
    solution, residual, direction = torch.zeros_like(target), target, target
    size = along = _dot(residual, residual)
    goal = size * precision**2
    for _ in range(max_iter):
        if not bool((size > goal).any()):
            break
        image = (direction * (1 + damping)).addcmul_(unseen, derivative(direction), value=-1)
        curvature = _dot(direction, image)
        # A block that has converged, or whose direction has no curvature, stops.
        steep = curvature > 100 * eps * along
        goal = torch.where(steep, goal, torch.inf)
        length = torch.where(size > goal, size / curvature.clamp(min=tiny), 0)
        solution.addcmul_(length, direction)
        residual = residual.addcmul(length, image, value=-1)
        smaller = _dot(residual, residual)
        turn = smaller / size.clamp(min=tiny)
        direction = torch.addcmul(residual, turn, direction)
        # The residual is orthogonal to the last direction, so their squares add up.
        size, along = smaller, smaller + turn.square() * along
    return solution


def implicit_gradient(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    estimate: Tensor,
    outgoing: Tensor,
    mixing: Tensor | None,
    tol: float,
) -> tuple[Tensor, Tensor]:
    """The adjoint of the derivative of the minimizer, with respect to `x` and `threshold`.

    The minimizer is the fixed point X = S(mask∘A + mask̄∘X) of the shrinkage S. With J the derivative of S there,
    the adjoint solves  v = g + mask̄∘J v  (by conjugate gradients on the unobserved entries, where I − mask̄∘J is
    symmetric and positive), then  Ā = mask∘J v.
    """
    problem, scale = scaled(x, mask, threshold, mixing)
    derivative = problem.derivative(problem.decompose(problem.fill(estimate / scale)))
    start = derivative(outgoing) * problem.unseen
    adjoint = outgoing + solve_hessian(derivative, problem.unseen, start, ADJOINT_ITERATIONS, tol)
    # A larger λ lowers every kept singular value equally: dS/dλ = −L₊V₊ᵀ.
    spectral = derivative.spectral
    along = ((slices(adjoint, mixing) @ spectral.right) * spectral.left).sum(-2)
    of_threshold = -(along * spectral.kept).sum(-1).reshape(x.shape[:2]).sum(-1)
    return derivative(adjoint) * mask, of_threshold


def size_of(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2, 3))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2, 3), keepdim=True)
