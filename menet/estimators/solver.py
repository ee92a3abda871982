"""The convex problem behind Soft-Impute and nuclear-norm minimisation, solved once for both.

    minimise over X:   ½ ‖mask ∘ (X − A)‖²  +  λ ‖X‖_*

by accelerated proximal gradient with adaptive restart (Beck & Teboulle, 2009; O'Donoghue & Candès, 2015), on a
whole batch, each matrix stopping by itself. Written by hand: general cone solvers take thousands of times longer
and no batched, differentiable solver of this problem is in a library.

A *block* is one problem: `(c, n, m)` with n ≥ m. Matrices are blocks with c = 1; for tensors ‖X‖_* is the sum of
the nuclear norms of the c slices after an orthogonal `mixing` of the channels (see `tensor.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from menet import linalg
from menet.chunks import in_chunks

# The momentum begins as if some steps had been taken: the start is good, so there is a direction to trust.
FIRST_MOMENTUM = 2.0
# The steps that decompose anew, more often at first, while the estimate still moves much.
EXACT_STEPS = (1, 3, 7)
EXACT_EVERY = 8


class Solution(NamedTuple):
    """The estimate and, per matrix, what happened.

    `gap` is the duality gap relative to the objective: the objective is at most that much above the optimum
    (and in practice far less, as the gap's dual point is only a scaled residual). `rank` is of the estimate.
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
    """The minimiser for each block of zero-filled `x` `(b, c, n, m)`, with its exact gradient.

    Differentiable in `x` and in `threshold` `(b,)`, by the implicit function theorem at the minimiser.
    """
    turned = x.shape[-1] > x.shape[-2]
    estimate = _Complete.apply(
        linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold, mixing, tol, max_iter
    )
    return estimate.mT if turned else estimate


def describe(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> Solution:
    """Solve, and say for each block how it went."""
    turned = x.shape[-1] > x.shape[-2]

    def piece(x: Tensor, mask: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        estimate, iterations = _iterate(x, mask, threshold, mixing, tol, max_iter)
        return estimate, iterations, *_duality_gap(estimate, x, mask, threshold, mixing)

    solution = in_chunks(piece, [linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold])
    return Solution(solution[0].mT if turned else solution[0], *solution[1:])


class _Complete(torch.autograd.Function):
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
        (estimate,) = in_chunks(
            lambda x, mask, threshold: _iterate(x, mask, threshold, mixing, tol, max_iter)[:1],
            [x, mask, threshold],
        )
        context.save_for_backward(x, mask, threshold, estimate, mixing)
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, threshold, estimate, mixing = context.saved_tensors
        of_x, of_threshold = in_chunks(
            partial(_implicit_gradient, mixing=mixing),
            [x, mask, threshold, estimate, outgoing.contiguous()],
        )
        return of_x, None, of_threshold, None, None, None


def _iterate(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> tuple[Tensor, Tensor]:
    """Proximal gradient on one chunk. A block that has converged leaves; the rest go on.

    Most shrinkages are `shrink_near`; a block leaves only by a step that was exact.
    """
    result = torch.empty_like(x)
    iterations = torch.full(x.shape[:1], max_iter, dtype=torch.long, device=x.device)
    index = torch.arange(len(x), device=x.device)
    running = torch.ones_like(index, dtype=torch.bool)
    unseen = (~mask).to(x.dtype)
    previous = point = local_average(x, mask)
    momentum = x.new_full((len(x), 1, 1, 1), FIRST_MOMENTUM)
    basis = x.new_empty(0)
    for iteration in range(1, max_iter + 1):
        filled = torch.addcmul(x, unseen, point)
        exact = iteration in EXACT_STEPS or iteration % EXACT_EVERY == 0 or iteration == max_iter
        estimate, basis = _shrink(filled, threshold, mixing, None if exact else basis)
        moved = point - estimate
        done = running & _small(moved, estimate, tol)
        if not exact and bool(done.any()):
            estimate[done], basis[done] = _shrink(filled[done], threshold[done], mixing)
            moved[done] = point[done] - estimate[done]
            done[done.clone()] = _small(moved[done], estimate[done], tol)

        step = estimate - previous
        # The momentum is forgotten when it points uphill (O'Donoghue & Candès' gradient scheme).
        uphill = torch.linalg.vecdot(moved.flatten(1), step.flatten(1)) > 0
        momentum = torch.where(uphill[:, None, None, None], 1.0, momentum)
        grown = (1 + (1 + 4 * momentum * momentum).sqrt()) / 2
        point = torch.addcmul(estimate, (momentum - 1) / grown, step)
        previous, momentum = estimate, grown

        if iteration == max_iter:
            result[index[running]] = estimate[running]
        elif bool(done.any()):
            result[index[done]], iterations[index[done]] = estimate[done], iteration
            running &= ~done
            remaining = int(running.sum())
            if remaining == 0:
                break
            # Copying the batch to leave out a few would cost more than carrying them along.
            if remaining <= 0.8 * len(running):
                index, x, unseen, threshold = index[running], x[running], unseen[running], threshold[running]
                previous, point, momentum = previous[running], point[running], momentum[running]
                basis = basis[running]
                running = torch.ones_like(index, dtype=torch.bool)
    return result, iterations


def _small(moved: Tensor, estimate: Tensor, tol: float) -> Tensor:
    norm = torch.linalg.vector_norm
    return norm(moved, dim=(1, 2, 3)) <= tol * norm(estimate, dim=(1, 2, 3))


def _shrink(
    filled: Tensor, threshold: Tensor, mixing: Tensor | None, basis: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    # The kernels see one batch of matrices: products over a single batch dimension cost the least to call.
    slices = (filled if mixing is None else _mix(mixing, filled)).flatten(0, 1)
    level = threshold.repeat_interleave(filled.shape[1])
    if basis is None:
        shrunk, basis = linalg.shrink(slices, level)
    else:
        shrunk, basis = linalg.shrink_near(slices, level, basis.flatten(0, 1))
    shrunk, basis = (part.unflatten(0, filled.shape[:2]) for part in (shrunk, basis))
    return (shrunk if mixing is None else _mix(mixing.mT, shrunk)), basis


def _mix(mixing: Tensor, blocks: Tensor) -> Tensor:
    return torch.einsum("dc,bcnm->bdnm", mixing, blocks)


def local_average(x: Tensor, mask: Tensor) -> Tensor:
    """Where to start: each entry the mean of the observed ones among its 3×3 neighbours.

    Neighbouring pixels are alike, so this saves a third of the iterations on images; the problem is convex, so
    nothing else depends on it. Where no neighbour is observed the mean of the matrix stands in.
    """
    seen = mask.to(x.dtype)
    mean = x.sum((-2, -1), keepdim=True) / seen.sum((-2, -1), keepdim=True).clamp(min=1)
    # A little of the mean is mixed in, which also decides the entries with no observed neighbour.
    return (_neighbourhood(x) + 0.1 * mean) / (_neighbourhood(seen) + 0.1)


def _neighbourhood(x: Tensor) -> Tensor:
    # Sums of slices: torch's average pooling takes five times as long on a CPU.
    padded = functional.pad(x, (1, 1, 1, 1))
    rows = padded[..., :-2, :] + padded[..., 1:-1, :] + padded[..., 2:, :]
    return rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]


def _implicit_gradient(
    x: Tensor, mask: Tensor, threshold: Tensor, estimate: Tensor, outgoing: Tensor, mixing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The adjoint of the derivative of the minimiser, with respect to `x` and `threshold`.

    The minimiser is the fixed point X = S(mask∘A + mask̄∘X) of the shrinkage S. With J the derivative of S there,
    the adjoint solves  v = g + mask̄∘J v  (by conjugate gradients on the unobserved entries, where I − mask̄∘J is
    symmetric and positive), then  Ā = mask∘J v.
    """
    filled = torch.where(mask, x, estimate)
    slices = filled if mixing is None else _mix(mixing, filled)
    derivative = linalg.shrink_derivative(slices, threshold[:, None].expand(slices.shape[:2]))

    def apply(direction: Tensor) -> Tensor:
        if mixing is None:
            return derivative(direction)
        return _mix(mixing.mT, derivative(_mix(mixing, direction)))

    zero = torch.zeros((), dtype=x.dtype, device=x.device)

    def unseen(direction: Tensor) -> Tensor:
        return torch.where(mask, zero, direction)

    adjoint = outgoing + _conjugate_gradients(lambda v: v - unseen(apply(v)), unseen(apply(outgoing)))
    pulled = apply(adjoint)
    # Shrinking harder moves every kept singular value down alike: dS/dλ = −U₊V₊ᵀ.
    mixed = adjoint if mixing is None else _mix(mixing, adjoint)
    along = ((mixed @ derivative.right) * derivative.left).sum(-2)
    of_threshold = -torch.where(derivative.kept, along, zero).sum((-2, -1))
    return torch.where(mask, pulled, zero), of_threshold


def _conjugate_gradients(operator: Callable[[Tensor], Tensor], target: Tensor, max_iter: int = 200) -> Tensor:
    """Solve `operator(v) = target` for each block; `operator` is symmetric and positive on their span."""
    tiny = torch.finfo(target.dtype).tiny
    solution, residual = torch.zeros_like(target), target
    direction = residual
    size = goal = residual.square().sum((1, 2, 3), keepdim=True)
    goal = goal * (torch.finfo(target.dtype).eps * 10) ** 2
    for _ in range(max_iter):
        if not bool((size > goal).any()):
            break
        image = operator(direction)
        length = size / (direction * image).sum((1, 2, 3), keepdim=True).clamp(min=tiny)
        # A block that has converged stands still while others go on.
        length = torch.where(size > goal, length, torch.zeros_like(length))
        solution = torch.addcmul(solution, length, direction)
        residual = torch.addcmul(residual, -length, image)
        smaller = residual.square().sum((1, 2, 3), keepdim=True)
        direction = torch.addcmul(residual, smaller / size.clamp(min=tiny), direction)
        size = smaller
    return solution


def _duality_gap(
    estimate: Tensor, x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The relative duality gap and the rank, in double precision."""
    estimate, x, threshold = estimate.double(), x.double(), threshold.double()
    mixing = None if mixing is None else mixing.double()
    residual = torch.where(mask, x - estimate, 0.0)
    values = torch.linalg.svdvals(estimate if mixing is None else _mix(mixing, estimate))
    primal = residual.square().sum((1, 2, 3)) / 2 + threshold * values.sum((1, 2))
    # Any residual scaled to spectral norm ≤ λ is feasible for the dual problem.
    norm = torch.linalg.svdvals(residual if mixing is None else _mix(mixing, residual)).amax((1, 2))
    scale = (threshold / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)[:, None, None, None]
    dual = (scale * residual * x - (scale * residual).square() / 2).sum((1, 2, 3))
    gap = (primal - dual).clamp(min=0) / primal.clamp(min=torch.finfo(primal.dtype).tiny)
    precision = max(estimate.shape[-2:]) * 10 * torch.finfo(torch.float32).eps
    rank = (values > precision * values.amax((1, 2), keepdim=True)).sum((1, 2))
    return gap, rank
