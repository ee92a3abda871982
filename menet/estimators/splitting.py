"""Completion of large images, whose estimates have a high rank, by accelerated Douglas–Rachford splitting.

A Newton step on them takes several products with all singular vectors for each iteration of its conjugate
gradients. Splitting (Lions & Mercier, 1979) takes one decomposition per step, and by Anderson's acceleration
(1965) needs about as many steps as Newton's method decompositions. It is also less sensitive to rounding: it
shrinks by a level of its own, several times λ, so that half of its steps may be in single precision.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from menet.estimators import newton

# The number of columns from which images are solved here, and the smallest λ, relative to the norm of the matrix.
SMALLEST, SMALLEST_RATIO = 224, 1e-5
# Steps before Newton's method takes over, and how many of them Anderson's acceleration combines, from which on.
STEPS = 40
MEMORY, FIRST = 4, 2
RELAXATION = 1.6
# The level is this multiple of √(λ·median singular value), and at least this multiple of λ.
LEVEL, LEAST = 2.5, 2.0
# Single precision serves while the gradient is above this multiple of the error it makes.
ROUNDING = 4.0


class Split(NamedTuple):
    """The estimate of one matrix, the steps (0 where they did not suffice), and what the adjoint needs."""

    estimate: Tensor
    iterations: int
    filled: Tensor
    values: Tensor
    vectors: Tensor


class _Past:
    """The last steps of an iteration, as Anderson's acceleration uses them."""

    def __init__(self) -> None:
        self.turns: list[Tensor] = []
        self.moved: list[Tensor] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def combined(self, point: Tensor, step: Tensor) -> Tensor:
        """The combination of the last points, each where a step has led, whose step were shortest if linear."""
        if self.last is not None:
            self.turns = [*self.turns[1 - MEMORY :], step - self.last[1]]
            self.moved = [*self.moved[1 - MEMORY :], point - self.last[0]]
        self.last = point, step
        if not self.turns:
            return point
        turns = [turn.flatten() for turn in self.turns]
        gram = torch.tensor([[float(a @ b) for a in turns] for b in turns], dtype=torch.float64)
        side = torch.tensor([float(turn @ step.flatten()) for turn in turns], dtype=torch.float64)
        gram += 1e-8 * gram.diagonal().max().clamp(min=newton.TINY) * torch.eye(len(gram))
        combined = point.clone()
        for weight, moved in zip(torch.linalg.solve(gram, side).tolist(), self.moved, strict=True):
            combined.add_(moved, alpha=-weight)
        return combined


def split(problem: newton.Problem, tol: float, max_iter: int) -> Split:
    """Solve the problem of one tall matrix until its gradient is at most `tol`·λ, as `solver.complete` promises.

    With X = S_τ(G) for the governing matrix G and the level τ = wλ, Y = (G − X)/w is a subgradient of λ‖X‖_* at
    X. S_λ(X + Y) is X, and S_λ is nonexpansive, so the gradient at X is at most the distance from Y to the
    observed residual: that needs no further decomposition.
    """
    x, unseen, threshold = problem.x[0, 0], problem.unseen[0, 0], float(problem.threshold[0])
    seen = 1 - unseen
    filled = problem.fill(newton.local_average(problem.x, problem.unseen == 0))[0, 0]
    exact = x.dtype == torch.float64
    values, vectors = _decompose(filled, exact)
    estimate = _shrunk(filled, values, vectors, threshold)
    weight = max(LEAST, LEVEL * math.sqrt(float(values.median()) / threshold))
    level = weight * threshold
    governing = estimate + weight * (filled - estimate)
    # What single precision makes of the Gram matrix, as a change of the estimate.
    error = torch.finfo(x.dtype).eps * math.sqrt(len(values)) * float(values[-1]) ** 2 / (2 * level)
    past = _Past()
    taken, limit = 0, min(STEPS, max_iter - 1)
    for step in range(1, limit + 1):
        values, vectors = _decompose(governing, exact)
        estimate = _shrunk(governing, values, vectors, level)
        rest = governing - estimate
        misfit = (x - estimate) * seen
        gradient = float(torch.linalg.vector_norm(misfit - rest / weight))
        if exact and gradient <= tol * threshold:
            taken = step + 1
            break
        # The proximal step of the misfit at the reflected point, minus the estimate.
        move = RELAXATION * torch.where(seen > 0, (weight * misfit - rest) / (1 + weight), -rest)
        exact = exact or gradient <= max(ROUNDING * error, tol * threshold)
        governing = governing + move
        if step > FIRST:
            governing = past.combined(governing, move)
    filled = estimate + rest / weight
    values = (values - level).clamp(min=0) + values.clamp(max=level) / weight
    return Split(estimate, taken, filled, values.to(x.dtype), vectors.to(x.dtype))


def _decompose(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Singular values, ascending, and right singular vectors, from the Gram matrix in double precision or x's."""
    x = x.double() if exact else x
    squares, vectors = torch.linalg.eigh(x.mT @ x)
    return squares.clamp(min=0).sqrt(), vectors


def _shrunk(x: Tensor, values: Tensor, vectors: Tensor, level: float) -> Tensor:
    ratio = 1 - level / values.clamp(min=level)
    return x @ ((vectors * ratio) @ vectors.mT).to(x.dtype)
