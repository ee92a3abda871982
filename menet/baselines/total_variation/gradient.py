"""The gradient of the minimizer with respect to the observed pixels.

Near a minimizer the same rows and columns stay equal, and observed entries that are unchanged stay so. Among such
images the objective is smooth, and by the implicit function theorem a gradient takes one solution of H q = g,
where H is the Hessian and g the gradient at the minimizer. It is found by conjugate gradients, which need only
products with H.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from menet.baselines.total_variation.splitting import STEP_OF_DIFFERENCES, STEP_OF_RESIDUAL, Problem

TOLERANCE = 1e-4  # of the residual relative to g, in the norm of the preconditioner
MAX_ITERATIONS = 400
CHECK_EVERY = 8
SHORTEST = 1e-6  # length of a difference that is distinguished from zero, on the common scale


def gradient_of_minimizer(
    x: Tensor, mask: Tensor, state: list[Tensor], outgoing: Tensor, weight: float
) -> Tensor:
    """The gradient at `x`, from `outgoing` at the minimizer with the final `state`; all are `(b, h, w)`.

    Where observed entries are unchanged, some in rows or columns that are equal, the minimizer has a kink: the
    gradient is then between those of the two sides.
    """
    hessian = Hessian.at(x, mask, state, weight)
    moved = _solve(hessian, hessian.project(outgoing).mul_(hessian.free))
    held = torch.where(hessian.free > 0, 0.0, outgoing - hessian(moved))
    # Observed entries determine themselves; a dropped one that equals some of them follows their mean.
    by_mean = (1 - hessian.kept) * held / hessian.project(hessian.kept).clamp(min=SHORTEST)
    through = torch.where(
        hessian.residual.factor > 0, hessian.residual.bend(moved * hessian.kept), held + hessian.project(by_mean)
    )
    return hessian.kept * through


class Norm(NamedTuple):
    """The curvature of a norm at a vector of direction u and length s: (1 − uuᵀ)/s, and none where it is zero."""

    direction: Tensor
    factor: Tensor
    dim: tuple[int, ...]

    @classmethod
    def shrunk(cls, part: Tensor, threshold: float, dim: tuple[int, ...], weight: float = 1.0) -> Self:
        """At the result of the proximal map of `part`, which is shorter by `threshold`."""
        size = torch.linalg.vector_norm(part, dim=dim, keepdim=True)
        left = size - threshold
        factor = torch.where(left > SHORTEST, weight / left, 0.0)
        return cls(part / size.clamp(min=1e-12), factor, dim)

    def bend(self, part: Tensor) -> Tensor:
        along = (part * self.direction).sum(self.dim, keepdim=True)
        return torch.addcmul(part, self.direction, along, value=-1).mul_(self.factor)

    def diagonal(self) -> Tensor:
        return (1 - self.direction.square()).mul_(self.factor)

    def keep(self, which: Tensor) -> Self:
        return self._replace(direction=self.direction[which], factor=self.factor[which])


@dataclass(frozen=True)
class Hessian:
    """The Hessian of the objective at a minimizer, on the images in which the same rows and columns are equal."""

    rows: Norm
    columns: Norm
    residual: Norm
    joining_rows: Tensor  # averages over equal rows, (b, h, h)
    joining_columns: Tensor
    kept: Tensor
    free: Tensor  # 1 where entries can move, 0 where unchanged observed ones determine them

    @classmethod
    def at(cls, x: Tensor, mask: Tensor, state: list[Tensor], weight: float) -> Self:
        whole, rows, columns = state
        problem = Problem(x.permute(1, 2, 0).contiguous(), mask.permute(1, 2, 0).contiguous(), weight)
        kept = mask.to(x.dtype)
        of_rows = Norm.shrunk(rows, 1 / STEP_OF_DIFFERENCES, (2,), weight)
        of_columns = Norm.shrunk(columns, 1 / STEP_OF_DIFFERENCES, (1,), weight)
        residual = Norm.shrunk((whole - problem.x.permute(2, 0, 1)) * kept, 1 / STEP_OF_RESIDUAL, (1, 2))
        joining_rows, joining_columns = _joining(of_rows.factor[:, :, 0]), _joining(of_columns.factor[:, 0])
        alone = joining_rows @ kept @ joining_columns == 0
        free = (alone | (residual.factor > 0)).to(x.dtype)
        return cls(of_rows, of_columns, residual, joining_rows, joining_columns, kept, free)

    def __call__(self, z: Tensor) -> Tensor:
        bent = self.residual.bend(z * self.kept)
        for norm, dim in ((self.rows, 1), (self.columns, 2)):
            part = norm.bend(z.diff(dim=dim))
            bent.narrow(dim, 1, part.shape[dim]).add_(part)
            bent.narrow(dim, 0, part.shape[dim]).sub_(part)
        return bent

    def diagonal(self) -> Tensor:
        whole = self.residual.diagonal() * self.kept
        for norm, dim in ((self.rows, 1), (self.columns, 2)):
            part = norm.diagonal()
            whole.narrow(dim, 1, part.shape[dim]).add_(part)
            whole.narrow(dim, 0, part.shape[dim]).add_(part)
        return whole

    def project(self, z: Tensor) -> Tensor:
        """The projection onto that space."""
        return self.joining_rows @ z @ self.joining_columns

    def keep(self, which: Tensor) -> Self:
        """Continue with some of the problems only."""
        return type(self)(
            self.rows.keep(which),
            self.columns.keep(which),
            self.residual.keep(which),
            self.joining_rows[which],
            self.joining_columns[which],
            self.kept[which],
            self.free[which],
        )


def _solve(hessian: Hessian, right: Tensor) -> Tensor:
    """Conjugate gradients, preconditioned by the diagonal; each problem stops by itself."""
    diagonal = hessian.project(hessian.diagonal())
    scaling = torch.where(diagonal > 0, 1 / diagonal, 0.0)
    left, found = right.clone(), torch.zeros_like(right)
    direction = scaling * left
    size = _dot(left, direction)
    goal = TOLERANCE**2 * size
    result, index = torch.zeros_like(right), torch.arange(len(right), device=right.device)
    for iteration in range(1, MAX_ITERATIONS + 1):
        bent = hessian.project(hessian(direction)).mul_(hessian.free)
        along = _dot(direction, bent)
        running = (size > goal) & (along > 0)
        length = torch.where(running, size / along, 0.0)
        found.addcmul_(length, direction)
        left.addcmul_(length, bent, value=-1)
        scaled = scaling * left
        before, size = size, _dot(left, scaled)
        direction.mul_(torch.where(running, size / before, 0.0)).add_(scaled)
        last = iteration == MAX_ITERATIONS
        if iteration % CHECK_EVERY and not last:
            continue
        goes_on = (running & (size > goal)).flatten() & (not last)
        remaining = int(goes_on.sum())
        # Copying to drop a few problems would cost more than keeping them.
        if remaining <= 0.7 * len(index):
            result[index] = found
            if not remaining:
                break
            hessian, index = hessian.keep(goes_on), index[goes_on]
            scaling, left, found, direction = (t[goes_on] for t in (scaling, left, found, direction))
            size, goal = size[goes_on], goal[goes_on]
    return result


def _joining(factors: Tensor) -> Tensor:
    """The matrices that average over runs of equal neighbors, `(b, n, n)` for factors `(b, n − 1)`."""
    stretch = pad((factors > 0).cumsum(1), (1, 0))
    same = (stretch[:, :, None] == stretch[:, None, :]).to(factors.dtype)
    return same / same.sum(2, keepdim=True)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)
