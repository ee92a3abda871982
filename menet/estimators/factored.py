"""Completion by factors with gradients: `complete` forward, the implicit function theorem backward."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from menet import linalg
from menet.estimators.base import FRACTION_OF_LARGEST, estimator
from menet.estimators.entries import Array, Completion, Entries, observed_entries
from menet.estimators.large import GAP, SWEEPS, complete

ADJOINT_ITERATIONS = 1000


@estimator(dimensions=2)
def factored(
    x: Tensor,
    mask: Tensor,
    shrinkage: float | None = None,
    *,
    rank: int | None = None,
    tol: float = GAP,
    max_iter: int = SWEEPS,
    gradient_tol: float = 1e-6,
) -> Tensor:
    """Estimate `(..., m, n)` as `soft_impute` without restored entries does, for large matrices of low rank.

    One matrix after another, each to a relative duality gap of `tol`. Differentiable by the implicit function
    theorem at the factors, to a relative residual of `gradient_tol`; with the default λ also through its
    dependence on `x`.
    """
    if shrinkage is None:
        threshold = linalg.largest_singular_value(x) * FRACTION_OF_LARGEST
    else:
        threshold = x.new_full(x.shape[:1], float(shrinkage))
    return _Factored.apply(x, mask, threshold, rank, tol, max_iter, gradient_tol)


class _Factored(torch.autograd.Function):
    """`complete` forward; differentiate the factors at the minimum backward."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        mask: Tensor,
        threshold: Tensor,
        rank: int | None,
        tol: float,
        max_iter: int,
        gradient_tol: float,
    ) -> Tensor:
        found = [
            complete(one, seen, float(level), rank=rank, tol=tol, max_iter=max_iter)
            if bool(one.count_nonzero())
            else None
            for one, seen, level in zip(x, mask, threshold, strict=True)
        ]
        context.found, context.gradient_tol = found, gradient_tol
        context.save_for_backward(x, mask)
        dense = [np.zeros(x.shape[1:]) if one is None else one.dense() for one in found]
        return torch.from_numpy(np.stack(dense)).to(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        x, mask = context.saved_tensors
        of_x, of_threshold = torch.zeros_like(x), x.new_zeros(len(x))
        for index, found in enumerate(context.found):
            if found is not None and found.rank:
                entries = observed_entries(x[index], mask[index])
                left, right = _adjoint(
                    entries, found, outgoing[index].double().cpu().numpy(), context.gradient_tol
                )
                moved = left @ found.right.T + found.left @ right.T
                of_x[index] = torch.from_numpy(moved).to(x) * mask[index]
                of_threshold[index] = -float((left * found.left).sum() + (right * found.right).sum())
        return of_x, None, of_threshold, *[None] * 4


def _adjoint(entries: Entries, found: Completion, outgoing: Array, tol: float) -> tuple[Array, Array]:
    """Solve Hz = (G·right, Gᵀ·left) with H the Hessian of the factored problem, by conjugate gradients.

    H is singular along rotations of the factors, which change nothing; the right side is orthogonal to them.
    """
    from menet.kernels.factors import curvature_rows

    left, right, across = found.left, found.right, entries.transposed
    residuals, turned = np.empty(len(entries.values)), np.empty(len(entries.values))
    entries.residuals(left, right, residuals)
    across.residuals(right, left, turned)
    split = left.size
    # Were all entries observed, a column of the factors would have the curvature of its singular value plus λ.
    fraction = len(entries.values) / (len(left) * len(right))
    curvature = fraction * found.singular_values + found.shrinkage
    scale = np.concatenate([np.broadcast_to(curvature, side.shape).ravel() for side in (left, right)])

    def hessian(vector: Array) -> Array:
        one, other = vector[:split].reshape(left.shape), vector[split:].reshape(right.shape)
        result = np.empty_like(one), np.empty_like(other)
        entries.over_rows(curvature_rows, residuals, entries.weights, left, right, one, other, result[0])
        across.over_rows(curvature_rows, turned, across.weights, right, left, other, one, result[1])
        return np.concatenate([part.ravel() for part in result]) + found.shrinkage * vector

    solution = np.zeros(split + right.size)
    rest = np.concatenate([(outgoing @ right).ravel(), (outgoing.T @ left).ravel()])
    ahead = rest / scale
    direction, size = ahead, float(rest @ ahead)
    goal = tol**2 * size
    for _ in range(ADJOINT_ITERATIONS):
        if size <= goal:
            break
        image = hessian(direction)
        bend = float(direction @ image)
        if bend <= 0:
            break
        solution += size / bend * direction
        rest = rest - size / bend * image
        ahead = rest / scale
        smaller = float(rest @ ahead)
        direction, size = ahead + smaller / size * direction, smaller
    return solution[:split].reshape(left.shape), solution[split:].reshape(right.shape)
