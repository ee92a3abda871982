"""The total-variation problem of a batch: one step of its solution, and the gradient of the minimizer.

Douglas–Rachford splitting (ADMM with over-relaxation) separates z from its residual and its differences, whose
norms have proximal maps in closed form; the system that couples them, (a + DᵀD) z = q, is diagonal in the basis
of the discrete cosine transform. One iteration is four small matrix products and a dozen passes over memory.
Problems are scaled to a common contrast, so one pair of step sizes fits all.

Near a minimizer the same rows and columns stay equal, and observed entries that are unchanged stay so. Among such
images the objective is smooth, and by the implicit function theorem a gradient with respect to the observed
pixels takes one solution of H q = g, where H is the Hessian and g the gradient at the minimizer. It is found by
conjugate gradients, which need only products with H.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from menet.estimators.newton import local_average
from menet.linalg import cosine_transform

# Tuned on CIFAR-10, SVHN and digits with λ from 0.03 to 1.
STEP_OF_DIFFERENCES = 2.0  # in units of λ
STEP_OF_RESIDUAL = 0.1
RELAXATION = 1.8
# Of the gradient.
TOLERANCE = 1e-4  # of the residual relative to g, in the norm of the preconditioner
MAX_ITERATIONS = 400
CHECK_EVERY = 8
SHORTEST = 1e-6  # length of a difference that is distinguished from zero, on the common scale

State = tuple[Tensor, Tensor, Tensor]  # the residual's copy of z, row differences, column differences


class Problem:
    """A chunk of problems on a common scale, and one step of the splitting on it.

    The batch is the last dimension, `(h, w, b)`: rows, columns and their differences are then contiguous in
    memory, and sums along them run over many problems at once.
    """

    def __init__(self, x: Tensor, mask: Tensor, weight: float) -> None:
        x = torch.where(mask, x, 0.0)
        self.start, self.scale = _start(x, mask)
        self.x, self.mask, self.weight = x / self.scale, mask.to(x.dtype), weight
        self.ratio = STEP_OF_RESIDUAL / (STEP_OF_DIFFERENCES * weight)
        self.bases, self.inverse = _coupling_system(x, self.ratio)
        self._allocate()

    def first(self) -> State:
        """The initial state: the start and its differences, longer by what the first step removes."""
        z = self.start / self.scale
        rows, columns = z.diff(dim=0), z.diff(dim=1)
        of_rows, of_columns = normalize(rows, dim=1), normalize(columns, dim=0)
        return (
            torch.lerp(z, self.x, self.mask),
            rows + of_rows / STEP_OF_DIFFERENCES,
            columns + of_columns / STEP_OF_DIFFERENCES,
        )

    def advance(self, state: State) -> Tensor:
        """Take one step, in place, and return the estimate.

        The proximal map of a norm removes a fraction of its vector, all of a short one; the reflection of the map
        removes twice that. `exact` then says where no residual remained, `apart` which rows and columns differ.

        Passes over memory dominate an iteration, allocations most of all: results go into existing buffers, and
        the estimate is valid only until the next call.
        """
        whole, rows, columns = state
        cut, spare, right, of_rows, of_columns = self.buffers
        torch.sub(whole, self.x, out=cut).mul_(self.mask)
        size = torch.mul(cut, cut, out=spare).flatten(0, 1).sum(0)
        fraction = _fraction_removed(size, 1 / STEP_OF_RESIDUAL)
        self.exact = fraction == 1
        cut.mul_(fraction)
        torch.sub(whole, cut, alpha=2, out=right)
        fractions = []
        for part, dim, buffer in ((rows, 0, of_rows), (columns, 1, of_columns)):
            size = torch.mul(part, part, out=buffer).sum(1 - dim, keepdim=True)
            fractions.append(_fraction_removed(size, 1 / STEP_OF_DIFFERENCES))
            torch.mul(part, (1 - 2 * fractions[-1]) / self.ratio, out=buffer)
            right.narrow(dim, 1, part.shape[dim]).add_(buffer)
            right.narrow(dim, 0, part.shape[dim]).sub_(buffer)
        self.apart = [fraction < 1 for fraction in fractions]
        left, across = self.bases
        lines = across.expand(len(right), -1, -1)
        torch.mm(left, right.flatten(1), out=spare.flatten(1))
        torch.bmm(lines, spare, out=right).mul_(self.inverse)
        torch.bmm(lines.mT, right, out=spare)
        torch.mm(left.mT, spare.flatten(1), out=right.flatten(1))
        whole.mul_(1 - RELAXATION).add_(right, alpha=RELAXATION).add_(cut, alpha=RELAXATION)
        for part, fraction, dim in ((rows, fractions[0], 0), (columns, fractions[1], 1)):
            part.mul_(1 - RELAXATION + RELAXATION * fraction)
            part.add_(right.narrow(dim, 1, part.shape[dim]), alpha=RELAXATION)
            part.sub_(right.narrow(dim, 0, part.shape[dim]), alpha=RELAXATION)
        return right

    def settled(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The best estimate after the last step, and its objective.

        Observed entries are put back where the step left no residual: z only converges to them. Rows and columns
        without a difference are averaged if that is better: early on there may be too many of them.
        """
        apart = torch.lerp(z, self.x, self.mask * self.exact)
        joined = _joined(_joined(apart, self.apart[0], 0), self.apart[1], 1)
        objectives = self.objective(apart), self.objective(joined)
        return torch.where(objectives[1] < objectives[0], joined, apart), torch.minimum(*objectives)

    def movement(self, before: State, after: State) -> Tensor:
        """The length of a step, in the norm in which no later step is longer."""
        whole, rows, columns = ((a - b).square_().sum((0, 1)) for a, b in zip(after, before, strict=True))
        return (self.ratio * whole + rows + columns).sqrt_()

    def objective(self, z: Tensor) -> Tensor:
        """The objective, on the common scale."""
        rows, columns = z.diff(dim=0).square_().sum(1).sqrt_(), z.diff(dim=1).square_().sum(0).sqrt_()
        residual = (z - self.x).mul_(self.mask).square_().sum((0, 1)).sqrt_()
        return residual + self.weight * (rows.sum(0) + columns.sum(0))

    def keep(self, which: Tensor) -> None:
        """Continue with some of the problems only."""
        self.x, self.mask, self.scale = self.x[..., which], self.mask[..., which], self.scale[which]
        self._allocate()

    def _allocate(self) -> None:
        h, w, b = self.x.shape
        shapes = (*((h, w, b),) * 3, (h - 1, w, b), (h, w - 1, b))
        self.buffers = [self.x.new_empty(shape) for shape in shapes]


def _fraction_removed(square: Tensor, threshold: float) -> Tensor:
    """The fraction of a vector that the proximal map of `threshold`·‖·‖₂ removes: `threshold` of its length."""
    return square.clamp_(min=1e-24).rsqrt_().mul_(threshold).clamp_(max=1)


def _joined(z: Tensor, apart: Tensor, dim: int) -> Tensor:
    """Average `z` over neighboring rows (`dim` 0) or columns (1) that are not `apart`."""
    group = pad(apart, (0,) * (2 * (2 - dim)) + (1, 0)).cumsum(dim).expand_as(z)
    sums, counts = (torch.zeros_like(z).scatter_add_(dim, group, t) for t in (z, torch.ones_like(z)))
    return (sums / counts.clamp_(min=1)).gather(dim, group)


def _start(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Local averages of the observed entries, and a measure of the size of their differences."""
    start = local_average(x.movedim(-1, 0), mask.movedim(-1, 0)).movedim(0, -1).contiguous()
    sizes = [start.diff(dim=0).square_().sum(1).sqrt_(), start.diff(dim=1).square_().sum(0).sqrt_()]
    return start, 1.5 * torch.cat(sizes).mean(0).clamp(min=1e-3)


def _coupling_system(like: Tensor, offset: float) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The bases of rows and columns in which 1 + DᵀD/`offset` is diagonal, and its inverse there."""
    (down, of_rows), (across, of_columns) = (basis_and_frequencies(size, like.device) for size in like.shape[:2])
    inverse = offset / (offset + of_rows[:, None] + of_columns)
    return (down.to(like.dtype), across.to(like.dtype)), inverse[..., None].to(like.dtype)


def basis_and_frequencies(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The orthonormal basis (rows) in which DᵀD is diagonal, and its diagonal there."""
    order = torch.arange(size, dtype=torch.float64, device=device)
    return cosine_transform(size).to(device), 2 - 2 * torch.cos(math.pi * order / size)


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
