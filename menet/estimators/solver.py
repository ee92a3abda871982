"""The convex problem behind Soft-Impute and nuclear-norm minimization, solved once for both.

    minimize over X:   ½ ‖mask ∘ (X − A)‖²  +  λ ‖X‖_*

by a few accelerated gradient steps, which find the rank, and then Newton's method on the unobserved entries,
which needs two or three more; on a whole batch, each matrix stopping by itself. Written by hand because general
cone solvers take hundreds of times longer, and no library has a batched, differentiable solver of this problem.

A *block* is one problem: `(c, n, m)` with n ≥ m. Matrices are blocks with c = 1; for tensors ‖X‖_* is the sum of
the nuclear norms of the c slices after an orthogonal `mixing` of the channels (see `tubal.py`).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from menet import kernels, linalg

# Gradient steps before the first Newton step, and Newton steps per attempt.
FIRST_STEPS = 6
NEWTON_STEPS = 6
# Conjugate gradients may be inexact inside Newton's method, but not for the gradient of the estimate.
NEWTON_ITERATIONS = 5
ADJOINT_ITERATIONS = 200
DAMPING = 4.0
# Momentum starts as if some steps had been taken: the initial estimate is good, so its direction can be trusted.
FIRST_MOMENTUM = 2.0
_TINY = 1e-30


class Solution(NamedTuple):
    """The estimate and, per matrix, the iterations, duality gap and rank.

    `gap` is the duality gap relative to the objective: the objective is at most that much above the optimum
    (in practice far less, as the dual point is only a scaled residual). `rank` is that of the estimate.
    """

    estimate: Tensor
    iterations: Tensor
    gap: Tensor
    rank: Tensor

    def of(self, x: Tensor, dimensions: int) -> "Solution":
        """The same in the shape and dtype of the caller's `x`, whose last `dimensions` make one problem."""
        batch = x.shape[: x.ndim - dimensions]
        return Solution(self.estimate.reshape(x.shape).to(x.dtype), *(part.reshape(batch) for part in self[1:]))


def complete(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> Tensor:
    """The minimizer for each block of zero-filled `x` `(b, c, n, m)`.

    Differentiable in `x` and in `threshold` `(b,)`, by the implicit function theorem at the minimizer.
    """
    turned = x.shape[-1] > x.shape[-2]
    estimate = _Complete.apply(
        linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold, mixing, tol, max_iter
    )
    return estimate.mT if turned else estimate


@linalg.no_autocast
def describe(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> Solution:
    """Solve, with the iterations, duality gap and rank of each block."""
    turned = x.shape[-1] > x.shape[-2]

    def solve_chunk(x: Tensor, mask: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        estimate, iterations = _iterate(x, mask, threshold, mixing, tol, max_iter)
        return estimate, iterations, *_duality_gap(estimate, x, mask, threshold, mixing)

    solution = linalg.in_chunks(
        solve_chunk, [linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold]
    )
    return Solution(solution[0].mT if turned else solution[0], *solution[1:])


class _Complete(torch.autograd.Function):
    """Solve forward; differentiate the minimizer, not the iterations, backward."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        mask: Tensor,
        threshold: Tensor,
        mixing: Tensor | None,
        tol: float,
        max_iter: int,
    ) -> Tensor:
        (estimate,) = linalg.in_chunks(
            lambda x, mask, threshold: _iterate(x, mask, threshold, mixing, tol, max_iter)[:1],
            [x, mask, threshold],
        )
        context.save_for_backward(x, mask, threshold, estimate, mixing)
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, threshold, estimate, mixing = context.saved_tensors
        of_x, of_threshold = linalg.in_chunks(
            partial(_implicit_gradient, mixing=mixing),
            [x, mask, threshold, estimate, outgoing.contiguous()],
        )
        return of_x, None, of_threshold, None, None, None


def _iterate(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> tuple[Tensor, Tensor]:
    """Solve one chunk: gradient steps and Newton steps alternate until every block has converged.

    For matrices on a CPU the same steps are compiled in `kernels/completion.py`: in torch most of the time would
    go into calls and passes over memory.
    """
    found = _compiled(x, mask, threshold, tol, max_iter) if mixing is None else None
    return found or _batched(x, mask, threshold, mixing, tol, max_iter)


def _compiled(
    x: Tensor, mask: Tensor, threshold: Tensor, tol: float, max_iter: int
) -> tuple[Tensor, Tensor] | None:
    """Blocks of one slice by the compiled solver; None where it does not apply."""
    if not kernels.suit(x):
        return None
    from menet.kernels.completion import complete_each

    estimate, iterations = torch.empty_like(x), torch.empty(len(x), dtype=torch.long)
    precision = torch.finfo(x.dtype)
    settings = (float(tol), max_iter, FIRST_STEPS, NEWTON_STEPS, NEWTON_ITERATIONS, DAMPING, FIRST_MOMENTUM)
    tensors = (x[:, 0], mask[:, 0], threshold, estimate[:, 0], iterations)
    converged = complete_each(
        *(tensor.detach().numpy() for tensor in tensors), settings, precision.eps, precision.tiny
    )
    return (estimate, iterations) if converged else None


def _batched(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> tuple[Tensor, Tensor]:
    problem = _Problem(x, (~mask).to(x.dtype), threshold, mixing)
    result = torch.empty_like(x)
    iterations = torch.full(x.shape[:1], max_iter, dtype=torch.long, device=x.device)
    index = torch.arange(len(x), device=x.device)
    filled = torch.addcmul(x, local_average(x, mask), problem.unseen)
    damping = x.new_full(x.shape[:1], DAMPING)
    used, steps = 0, FIRST_STEPS
    while True:
        steps = min(steps, max_iter - used - 1)
        filled = _accelerate(problem, filled, steps)
        used += steps
        estimate, filled, taken = _newton(problem, filled, damping, tol, min(NEWTON_STEPS, max_iter - used))
        done = taken > 0
        used_up = used + NEWTON_STEPS >= max_iter
        result[index] = estimate
        iterations[index[done]] = used + taken[done]
        left = ~done
        if used_up or not bool(left.any()):
            return result, iterations
        used += NEWTON_STEPS
        problem, filled, index, damping = problem.of(left), filled[left], index[left], damping[left]
        # Blocks that did not converge are far from their minimum in a flat valley: more gradient steps, more
        # damping.
        steps, damping = 2 * steps, 8 * damping


class _Problem(NamedTuple):
    """Blocks to solve, as the minimization of a smooth function of the unobserved entries u.

    The function is the minimum over X of ½‖X − z‖² + λ‖X‖_*, where z = A + u is the *filled* matrix, reached at
    X = S(z) with S the shrinkage. Its gradient u − unseen∘S(z) is 1-Lipschitz, its Hessian I − unseen∘J with J
    the derivative of S.
    """

    x: Tensor
    unseen: Tensor
    threshold: Tensor
    mixing: Tensor | None

    def of(self, chosen: Tensor) -> "_Problem":
        return _Problem(self.x[chosen], self.unseen[chosen], self.threshold[chosen], self.mixing)

    def fill(self, estimate: Tensor) -> Tensor:
        """A with the estimate at its unobserved entries; a gradient step if the estimate is S(z)."""
        return torch.addcmul(self.x, self.unseen, estimate)

    def decompose(self, filled: Tensor) -> linalg.Decomposition:
        return linalg.decompose(_slices(filled, self.mixing))

    def shrink(self, decomposition: linalg.Decomposition) -> Tensor:
        """S(z) of the decomposed z."""
        return _blocks(linalg.shrink(decomposition, self._level()), self.x.shape, self.mixing)

    def derivative(self, decomposition: linalg.Decomposition) -> "_Derivative":
        """The derivative of S at the decomposed z."""
        return _Derivative(linalg.shrink_derivative(decomposition, self._level()), self.mixing)

    def _level(self) -> Tensor:
        return self.threshold.repeat_interleave(self.x.shape[1])


class _Derivative(NamedTuple):
    """The derivative of the shrinkage of blocks, from that of their slices."""

    spectral: linalg.SpectralDerivative
    mixing: Tensor | None

    def __call__(self, direction: Tensor) -> Tensor:
        return _blocks(self.spectral(_slices(direction, self.mixing)), direction.shape, self.mixing)


def _slices(blocks: Tensor, mixing: Tensor | None) -> Tensor:
    """Blocks as one batch of matrices, their channels mixed, as `linalg` takes them."""
    if mixing is not None:
        blocks = torch.einsum("dc,bcnm->bdnm", mixing, blocks)
    return blocks.flatten(0, 1)


def _blocks(slices: Tensor, shape: torch.Size, mixing: Tensor | None) -> Tensor:
    """The inverse of `_slices`."""
    blocks = slices.reshape(shape)
    return blocks if mixing is None else torch.einsum("dc,bdnm->bcnm", mixing, blocks)


def _accelerate(problem: _Problem, filled: Tensor, steps: int) -> Tensor:
    """Gradient steps with Nesterov momentum, restarted when it points uphill (O'Donoghue & Candès, 2015)."""
    point, previous = filled, filled
    momentum = filled.new_full((len(filled), 1, 1, 1), FIRST_MOMENTUM)
    for _ in range(steps):
        filled = problem.fill(problem.shrink(problem.decompose(point)))
        moved = filled - previous
        uphill = (_dot(point - filled, moved) > 0).to(momentum.dtype)
        momentum = torch.lerp(momentum, torch.ones_like(momentum), uphill)
        grown = (1 + (1 + 4 * momentum * momentum).sqrt()) / 2
        point = torch.addcmul(filled, (momentum - 1) / grown, moved)
        previous, momentum = filled, grown
    return filled


def _newton(
    problem: _Problem, filled: Tensor, damping: Tensor, tol: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton steps by conjugate gradients: estimates, filled matrices, and the step at which each converged.

    A block whose gradient grew is reset by a plain gradient step and leaves with step 0 (not converged). Work is
    spent on the remaining blocks only.
    """
    norm = torch.linalg.vector_norm
    estimates, settled = torch.empty_like(filled), torch.empty_like(filled)
    taken = torch.zeros(len(filled), dtype=torch.long, device=filled.device)
    index = torch.arange(len(filled), device=filled.device)
    rounding = 4 * torch.finfo(filled.dtype).eps
    before = torch.full(filled.shape[:1], torch.inf, dtype=filled.dtype, device=filled.device)
    last_shrunk, last_stepped = filled, filled
    for step in range(1, steps + 1):
        decomposition = problem.decompose(filled)
        shrunk = problem.shrink(decomposition)
        stepped = problem.fill(shrunk)
        downhill = stepped - filled
        size, length = norm(downhill, dim=(1, 2, 3)), norm(shrunk, dim=(1, 2, 3)).clamp(min=_TINY)
        finished = size <= rounding * length
        worse = ~((size < before) | finished)
        done = finished | (~worse & (size <= tol * length))
        taken[index[done]] = step
        leaves = torch.ones_like(done) if step == steps else done | worse
        if bool(leaves.any()):
            ahead, back, gone = leaves & ~worse, leaves & worse, index[leaves]
            estimates[index[ahead]], settled[index[ahead]] = shrunk[ahead], stepped[ahead]
            estimates[index[back]], settled[index[back]] = last_shrunk[back], last_stepped[back]
            if len(gone) == len(index):
                break
            stays = ~leaves
            index, problem, damping = index[stays], problem.of(stays), damping[stays]
            decomposition = decomposition.of(stays.repeat_interleave(problem.x.shape[1]))
            filled, shrunk, stepped, downhill = filled[stays], shrunk[stays], stepped[stays], downhill[stays]
            size, length = size[stays], length[stays]
        # Far from the minimum the Hessian is damped in proportion to the gradient (Levenberg–Marquardt).
        added = (damping * size / length)[:, None, None, None]
        derivative = problem.derivative(decomposition)
        filled = filled + _solve_hessian(derivative, problem.unseen, downhill, NEWTON_ITERATIONS, 0.1, added)
        before, last_shrunk, last_stepped = size, shrunk, stepped
    return estimates, settled, taken


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


def _implicit_gradient(
    x: Tensor, mask: Tensor, threshold: Tensor, estimate: Tensor, outgoing: Tensor, mixing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The adjoint of the derivative of the minimizer, with respect to `x` and `threshold`.

    The minimizer is the fixed point X = S(mask∘A + mask̄∘X) of the shrinkage S. With J the derivative of S there,
    the adjoint solves  v = g + mask̄∘J v  (by conjugate gradients on the unobserved entries, where I − mask̄∘J is
    symmetric and positive), then  Ā = mask∘J v.
    """
    problem = _Problem(x, (~mask).to(x.dtype), threshold, mixing)
    derivative = problem.derivative(problem.decompose(problem.fill(estimate)))
    precision = 10 * torch.finfo(x.dtype).eps
    start = derivative(outgoing) * problem.unseen
    adjoint = outgoing + _solve_hessian(derivative, problem.unseen, start, ADJOINT_ITERATIONS, precision)
    # A larger λ lowers every kept singular value equally: dS/dλ = −L₊V₊ᵀ.
    spectral = derivative.spectral
    along = ((_slices(adjoint, mixing) @ spectral.right) * spectral.left).sum(-2)
    of_threshold = -(along * spectral.kept).sum(-1).reshape(x.shape[:2]).sum(-1)
    return derivative(adjoint) * mask, of_threshold


def _solve_hessian(
    derivative: _Derivative,
    unseen: Tensor,
    target: Tensor,
    max_iter: int,
    precision: float,
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


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2, 3), keepdim=True)


def _duality_gap(
    estimate: Tensor, x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The relative duality gap and the rank, in double precision."""
    estimate, x, threshold = estimate.double(), x.double(), threshold.double()
    mixing = None if mixing is None else mixing.double()
    residual = torch.where(mask, x - estimate, 0.0)
    values = torch.linalg.svdvals(_slices(estimate, mixing)).reshape(len(x), -1)
    primal = residual.square().sum((1, 2, 3)) / 2 + threshold * values.sum(1)
    # Any residual scaled to spectral norm ≤ λ is feasible for the dual problem.
    norm = torch.linalg.svdvals(_slices(residual, mixing)).reshape(len(x), -1).amax(1)
    scale = (threshold / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)[:, None, None, None]
    dual = (scale * residual * x - (scale * residual).square() / 2).sum((1, 2, 3))
    gap = (primal - dual).clamp(min=0) / primal.clamp(min=torch.finfo(primal.dtype).tiny)
    rank = (values > 1e-6 * values.amax(1, keepdim=True)).sum(1)
    return gap, rank
