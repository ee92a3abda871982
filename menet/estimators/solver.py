"""The convex problem behind Soft-Impute and nuclear-norm minimization, solved once for both.

    minimize over X:   ½ ‖mask ∘ (X − A)‖²  +  λ ‖X‖_*

by a few accelerated gradient steps, which find the rank, and then Newton's method on the unobserved entries,
which needs two or three more; on a whole batch, each matrix stopping by itself. Where λ is small for the scale of
the data that is slow, and Douglas–Rachford splitting takes over, whose steps are as long as the singular values
are large, not as λ. Written by hand because general cone solvers take hundreds of times longer, and no library
has a batched, differentiable solver of this problem.

A *block* is one problem: `(c, n, m)` with n ≥ m. Matrices are blocks with c = 1; for tensors ‖X‖_* is the sum of
the nuclear norms of the c slices after an orthogonal `mixing` of the channels (see `tubal.py`).
"""

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from menet import kernels, linalg

# Gradient steps before the first Newton step, and Newton steps before the splitting.
FIRST_STEPS = 4
NEWTON_STEPS = 60
# Conjugate gradients may be inexact inside Newton's method; for the gradient there is a tolerance.
# Their relative residual far from the goal and close to it, and how many times `tol`·λ is far.
NEWTON_ITERATIONS = 30
FORCING = (0.3, 0.1, 30.0)
ADJOINT_ITERATIONS = 500
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}
# The initial damping, and its factors after a step that lowered the gradient and one that did not.
DAMPING = (4.0, 0.5, 8.0)
# Momentum starts as if some steps had been taken: the initial estimate is good, so its direction can be trusted.
FIRST_MOMENTUM = 2.0
# Splitting: its first round, its over-relaxation, and its first threshold relative to the largest singular value.
SPLITTING_STEPS = 64
RELAXATION = 1.6
FIRST_LEVEL = 0.2
# A smaller λ, relative to the norm of the matrix, is taken as this: double precision does not resolve less.
SMALLEST = 1e-9
_TINY = 1e-30


class ConvergenceWarning(UserWarning):
    """Some matrices reached `max_iter` before `tol`."""


class Solution(NamedTuple):
    """The estimate and, per matrix, the iterations, duality gap and rank.

    `gap` is the duality gap relative to the objective: the objective is at most that much above the optimum
    (in practice far less, as the dual point is only a scaled residual). `rank` is that of the estimate, at the
    precision of its dtype.
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
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    tol: float,
    max_iter: int,
    gradient_tol: float | None = None,
) -> Tensor:
    """The minimizer for each block of zero-filled `x` `(b, c, n, m)`.

    A block stops when the norm of its gradient is at most `tol`·λ, which bounds its relative duality gap by about
    2·`tol` and in practice leaves the objective within `tol`² of its minimum, or when its gap is at most `tol`².
    Differentiable in `x` and in `threshold` `(b,)`, by the implicit function theorem at the minimizer; its linear
    system is solved to a relative residual of `gradient_tol`.
    """
    turned = x.shape[-1] > x.shape[-2]
    if gradient_tol is None:
        gradient_tol = GRADIENT_TOLERANCE[x.dtype]
    estimate = _Complete.apply(
        *(linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold, mixing, tol, max_iter),
        gradient_tol,
    )
    return estimate.mT if turned else estimate


@linalg.no_autocast
def describe(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> Solution:
    """Solve, with the iterations, duality gap and rank of each block."""
    turned = x.shape[-1] > x.shape[-2]

    def solve_chunk(x: Tensor, mask: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        estimate, iterations, certified = _solve(x, mask, threshold, mixing, tol, max_iter)
        gap, rank = _duality_gap(estimate, x, mask, threshold, mixing)
        return estimate, iterations, torch.minimum(gap, certified), rank

    estimate, iterations, gap, rank = linalg.in_chunks(
        solve_chunk, [linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold]
    )
    _warn(iterations)
    return Solution(estimate.mT if turned else estimate, iterations.abs(), gap, rank)


def _warn(iterations: Tensor) -> None:
    """Say how many blocks reached the limit: their iterations are negative."""
    if missed := int((iterations < 0).sum()):
        warnings.warn(
            f"{missed} of {len(iterations)} matrices did not converge in {-int(iterations.min())} iterations; "
            "raise max_iter, or loosen tol",
            ConvergenceWarning,
            stacklevel=2,
        )


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
        gradient_tol: float,
    ) -> Tensor:
        keep = any(context.needs_input_grad) and mixing is None and kernels.suit(x)
        estimate, iterations, _, *reached = linalg.in_chunks(
            lambda x, mask, threshold: _solve(x, mask, threshold, mixing, tol, max_iter, keep),
            [x, mask, threshold],
        )
        _warn(iterations)
        context.gradient_tol = gradient_tol
        if keep:
            context.save_for_backward(mask, *reached)
        else:
            context.save_for_backward(mask, x, threshold, estimate, mixing)
        context.compiled = keep
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        mask, *saved = context.saved_tensors
        outgoing = outgoing.contiguous()
        if context.compiled:
            adjoint = partial(_compiled_adjoint, tol=context.gradient_tol)
            of_x, of_threshold = linalg.in_chunks(adjoint, [outgoing, mask, *saved])
        else:
            x, threshold, estimate, mixing = saved
            adjoint = partial(_implicit_gradient, mixing=mixing, tol=context.gradient_tol)
            of_x, of_threshold = linalg.in_chunks(adjoint, [x, mask, threshold, estimate, outgoing])
        return of_x, None, of_threshold, *[None] * 4


def _solve(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    tol: float,
    max_iter: int,
    keep: bool = False,
) -> tuple[Tensor, ...]:
    """Solve one chunk: estimates, iterations (negative where the limit was reached) and certified gaps (or inf).

    Three methods, each for what the one before left: gradient and Newton steps in the precision of `x`; the same
    in double precision, which a small λ needs; splitting and Newton steps. With `keep` also what the compiled
    adjoint needs: the filled matrices, their singular values and right singular vectors (as rows), and λ.
    """
    estimate, iterations, *reached = _attempt(x, mask, threshold, mixing, tol, max_iter, keep)
    certified = torch.full(x.shape[:1], torch.inf, dtype=torch.float64, device=x.device)
    left = iterations == 0
    if bool(left.any()):
        again = _solve if x.dtype != torch.float64 else _split
        rest = None if mixing is None else mixing.double()
        part = x[left].double(), mask[left], threshold[left].double(), rest
        found = again(*part, tol, max_iter)
        estimate[left], iterations[left], certified[left] = found[0].to(x.dtype), found[1], found[2]
        if keep:
            for whole, piece in zip(reached, _reached(*part, found[0]), strict=True):
                whole[left] = piece.to(x.dtype)
    return estimate, iterations, certified, *reached


def _reached(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, estimate: Tensor
) -> tuple[Tensor, ...]:
    """What the compiled adjoint needs, from an estimate that the compiled solver did not make."""
    problem, scale = _scaled(x, mask, threshold, mixing)
    filled, values, vectors = problem.decompose(problem.fill(estimate / scale))
    return filled[:, None], values, vectors.mT, problem.threshold


def _attempt(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int, keep: bool
) -> tuple[Tensor, ...]:
    """Gradient steps and Newton steps in turns, for a few rounds; iterations are 0 where that did not suffice.

    For matrices on a CPU the same steps are compiled in `kernels/completion.py`: in torch most of the time would
    go into calls and passes over memory.
    """
    found = _compiled(x, mask, threshold, tol, max_iter, keep) if mixing is None else None
    if found is not None:
        return found
    estimate, iterations = _batched(x, mask, threshold, mixing, tol, max_iter)
    return estimate, iterations, *(_reached(x, mask, threshold, mixing, estimate) if keep else ())


def _compiled(
    x: Tensor, mask: Tensor, threshold: Tensor, tol: float, max_iter: int, keep: bool
) -> tuple[Tensor, ...] | None:
    """Blocks of one slice by the compiled solver; None where it does not apply."""
    if not kernels.suit(x):
        return None
    from menet.kernels.completion import complete_each

    estimate, iterations = torch.empty_like(x), torch.empty(len(x), dtype=torch.long)
    count, size = len(x) if keep else 0, x.shape[-1]
    reached = (
        *(x.new_empty(count, 1, *x.shape[2:]), x.new_empty(count, size), x.new_empty(count, size, size)),
        x.new_empty(count),
    )
    precision = torch.finfo(x.dtype)
    settings = (
        *(float(tol), max_iter, FIRST_STEPS, NEWTON_STEPS, NEWTON_ITERATIONS, FIRST_MOMENTUM),
        *(_solvable(x.dtype, tol), SMALLEST, *DAMPING, *FORCING),
    )
    tensors = (x[:, 0], mask[:, 0], threshold, estimate[:, 0], iterations)
    converged = complete_each(
        *(tensor.detach().numpy() for tensor in tensors),
        tuple(tensor.numpy() for tensor in (reached[0][:, 0], *reached[1:])),
        settings,
        precision.eps,
        precision.tiny,
    )
    if not converged:
        return None
    return estimate, iterations, *(reached if keep else ())


def _compiled_adjoint(outgoing: Tensor, mask: Tensor, *reached: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """`_implicit_gradient` by the compiled loop."""
    from menet.kernels.completion import adjoint_each

    of_x, of_threshold = torch.empty_like(outgoing), outgoing.new_empty(len(outgoing))
    precision = torch.finfo(outgoing.dtype)
    tensors = mask[:, 0], outgoing[:, 0], of_x[:, 0], of_threshold
    adjoint_each(
        tuple(tensor.numpy() for tensor in (reached[0][:, 0], *reached[1:])),
        *(tensor.numpy() for tensor in tensors),
        *(tol, ADJOINT_ITERATIONS, precision.eps, precision.tiny),
    )
    return of_x, of_threshold


def _solvable(dtype: torch.dtype, tol: float) -> float:
    """The smallest λ, relative to the norm of the matrix, whose gradient this precision resolves to `tol`·λ.

    The Gram matrix gives a singular value s with an error of about eps·s₁²/s.
    """
    if dtype == torch.float64:
        return 0.0
    return min(1.0, math.sqrt(0.1 * torch.finfo(dtype).eps / max(tol, 1e-5)))


def _batched(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> tuple[Tensor, Tensor]:
    problem, scale = _scaled(x, mask, threshold, mixing)
    result = torch.zeros_like(x)
    iterations = torch.zeros(len(x), dtype=torch.long, device=x.device)
    solvable = problem.threshold >= _solvable(x.dtype, tol) * _norm(problem)
    index = torch.where(solvable | (problem.threshold == 0))[0]
    problem = problem.of(index)
    if len(index):
        steps = min(FIRST_STEPS, max_iter - 1)
        filled = _accelerate(problem, problem.fill(local_average(problem.x, mask[index])), steps)
        limit = min(NEWTON_STEPS, max_iter - steps)
        result[index], taken = _newton(problem, filled, tol, limit)
        missed = -max_iter if steps + limit >= max_iter else 0
        iterations[index] = torch.where(taken > 0, steps + taken, missed)
    return result * scale, iterations


def _split(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> tuple[Tensor, ...]:
    """Splitting and Newton steps in turns until every block has converged or reached the limit; as `_solve`.

    Douglas–Rachford splitting (Lions & Mercier, 1979) shrinks by a `level` of its own choice, the size of the
    singular values instead of λ, so a small λ costs no more iterations than a large one. The ratio of the two
    weights the residual, and is balanced (Boyd et al., 2011, §3.4).
    """
    problem, scale = _scaled(x, mask, threshold, mixing)
    result, problem_threshold = torch.zeros_like(x), problem.threshold
    iterations = torch.full(x.shape[:1], -max_iter, dtype=torch.long, device=x.device)
    certified = torch.full_like(problem.threshold, torch.inf)
    index = torch.arange(len(x), device=x.device)
    governing, before = problem.x, problem.x
    spectrum = problem.decompose(problem.x).values.reshape(len(x), -1).amax(1)
    level = torch.maximum(FIRST_LEVEL * spectrum, problem.threshold)
    used, steps, goal = FIRST_STEPS + NEWTON_STEPS, SPLITTING_STEPS, max(tol**2, 1e-5)
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
                primal = _size(estimate - near) / _size(estimate).clamp(min=_TINY)
                change = _size(near - before) / _size(governing - estimate).clamp(min=_TINY)
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
        limit = min(NEWTON_STEPS, max_iter - used)
        estimate, taken = _newton(problem, problem.fill(estimate), tol, limit)
        done, stays = taken > 0, taken == 0
        result[index[done]], iterations[index[done]] = estimate[done], used + taken[done]
        certified[index[done]] = torch.inf
        problem, index, level = problem.of(stays), index[stays], level[stays]
        governing, before = governing[stays], before[stays]
        used, steps, goal = used + limit, 2 * steps, tol**2
    # A λ that was raised to `SMALLEST` is another problem.
    raised = problem_threshold > threshold / scale[:, 0, 0, 0]
    return result * scale, iterations, torch.where(raised, torch.inf, certified)


def _scaled(x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None) -> tuple["_Problem", Tensor]:
    """The problem in units of a power of two close to the largest entry of each block, and these units."""
    scale = linalg.power_of_two(x, (1, 2, 3))
    problem = _Problem(x / scale, (~mask).to(x.dtype), threshold / scale[:, 0, 0, 0], mixing)
    small = torch.maximum(problem.threshold, SMALLEST * _norm(problem))
    return problem._replace(threshold=torch.where(problem.threshold > 0, small, 0)), scale


def _norm(problem: "_Problem") -> Tensor:
    """The norm of the whole matrix, if its unobserved entries are as large as the others."""
    seen = (1 - problem.unseen).mean((1, 2, 3)).clamp(min=1 / problem.x[0].numel())
    return _size(problem.x) / seen.sqrt()


def _size(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2, 3))


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

    def shrink(self, decomposition: linalg.Decomposition, level: Tensor | None = None) -> Tensor:
        """S(z) of the decomposed z, by λ or by another level."""
        return _blocks(linalg.shrink(decomposition, self._of_slices(level)), self.x.shape, self.mixing)

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
        scale = self.threshold / (self.threshold + _size(dual * self.unseen)).clamp(min=_TINY)
        dual = dual * (1 - self.unseen)
        value = scale * (dual * self.x).sum((1, 2, 3)) - scale.square() * dual.square().sum((1, 2, 3)) / 2
        return (primal - value) / primal.clamp(min=_TINY)

    def _of_slices(self, level: Tensor | None = None) -> Tensor:
        return (self.threshold if level is None else level).repeat_interleave(self.x.shape[1])


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


def _newton(problem: _Problem, filled: Tensor, tol: float, steps: int) -> tuple[Tensor, Tensor]:
    """Newton steps by conjugate gradients: estimates, and the step at which each converged, or 0.

    Where a step did not lower the gradient, it is undone and the next one damped more (Levenberg–Marquardt). Work
    is spent on the remaining blocks only.
    """
    estimates = torch.empty_like(filled)
    taken = torch.zeros(len(filled), dtype=torch.long, device=filled.device)
    index = torch.arange(len(filled), device=filled.device)
    rounding = 4 * torch.finfo(filled.dtype).eps
    first, less, more = DAMPING
    damping = torch.full_like(problem.threshold, first)
    before = torch.full_like(problem.threshold, torch.inf)
    last_shrunk, last_stepped = filled, filled
    for step in range(1, steps + 1):
        decomposition = problem.decompose(filled)
        shrunk = problem.shrink(decomposition)
        stepped = problem.fill(shrunk)
        downhill = stepped - filled
        size, length = _size(downhill), _size(shrunk).clamp(min=_TINY)
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
        ahead = filled + _solve_hessian(derivative, problem.unseen, downhill, NEWTON_ITERATIONS, precision, added)
        # Undone to the gradient step that the Newton step was to improve.
        filled = torch.where(undone, last_stepped, ahead)
    return estimates, taken


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
    problem, scale = _scaled(x, mask, threshold, mixing)
    derivative = problem.derivative(problem.decompose(problem.fill(estimate / scale)))
    start = derivative(outgoing) * problem.unseen
    adjoint = outgoing + _solve_hessian(derivative, problem.unseen, start, ADJOINT_ITERATIONS, tol)
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
