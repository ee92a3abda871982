"""Completion of matrices whose estimate has a low rank, one after another, by steps in a subspace.

`estimators/solver.py` completes each matrix for one λ (`low_rank_each`), `estimators/path.py` for one λ of a path
after another (`warm_each`).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import REGISTER, Array, Number, compiled, inlined, padded, scale_of
from menet.kernels.eigenvectors import eigh, scratch_for


@compiled
def low_rank_each(
    x: Array,
    mask: NDArray[np.bool_],
    thresholds: Array,
    sketch: Array,
    estimate: Array,
    iterations: NDArray[np.int64],
    ranks: NDArray[np.int64],
    settings: tuple[float, int, int, float, float, float],
    eps: float,
    tiny: float,
) -> None:
    """Accelerated gradient steps whose singular vectors are sought in a subspace, while λ falls to its value.

    Each step improves the subspace by one power iteration, so that it costs a tenth of a decomposition or less.
    The subspace begins with 16 rows of `sketch`, doubles where nearly all of its singular values are above λ, and
    ends at all rows. A matrix has converged when its gradient is at most tol·λ, and a Cholesky factorization
    proves that no singular value beyond λ by a third of that was missed. `settings` holds tol, the most steps at
    the final λ, and those with too small a subspace or without a proof, the first λ relative to the largest
    singular value, the factor by which it falls, and the smallest ratio of λ to the norm that is solved here.
    `iterations` and `ranks` are 0 where that did not suffice; the estimate is then one to start at.
    """
    tol, most_steps, few_steps, first_level, fall, solvable = settings
    rows, size = x.shape[1], x.shape[2]
    width, largest_rank = padded(size), len(sketch)
    kind = x.dtype
    zero, one, least = kind.type(0), kind.type(1), kind.type(math.sqrt(tiny))
    big = (rows, width)
    a, unseen, filled = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    shrunk, before, gram = np.zeros(big, kind), np.zeros(big, kind), np.zeros((width, width), kind)
    for number in range(len(x)):
        scale = scale_of(x[number], kind.type(tiny))
        total, seen = zero, zero
        for r in range(rows):
            for k in range(size):
                entry = x[number, r, k] / scale
                a[r, k] = entry
                unseen[r, k] = not mask[number, r, k]
                total += entry * entry
                seen += one - unseen[r, k]
        norm = kind.type(math.sqrt(total * kind.type(rows * size) / max(seen, one)))
        goal = thresholds[number] / scale
        iterations[number] = 0
        ranks[number] = 0
        filled[:] = a
        before[:] = zero
        shrunk[:] = zero
        level = kind.type(np.inf)
        rank = min(REGISTER, largest_rank)
        limit = 0 if goal < kind.type(solvable) * norm else most_steps
        work = _subspace(rows, width, rank, kind)
        work[0][:] = sketch[:rank]
        momentum = 1.0
        steps, final_steps, next_proof, vain = 0, 0, 0, 0
        while final_steps < limit and steps < 4 * most_steps:
            steps += 1
            basis, left, product, vectors, core, mixed, values, scratch = work
            drift = _left_vectors(filled, work, level, eps, least)
            np.dot(left.T, filled, product)
            np.dot(product, product.T, scratch[0])
            if not eigh(scratch, values, vectors, eps, tiny):
                break
            for k in range(rank):
                values[k] = math.sqrt(max(values[k], zero))
            level = max(goal, min(kind.type(fall) * level, kind.type(first_level) * values[rank - 1]))
            above = 0
            for k in range(rank):
                above += values[k] > level
                ratio = max(values[k] - level, zero) / max(values[k], least)
                for i in range(rank):
                    mixed[k, i] = ratio * vectors[k, i]
            np.dot(vectors.T, mixed, core)
            np.dot(core, product, basis)
            np.dot(left, basis, shrunk)
            _right_vectors(work, least)
            if above + 4 > rank and rank < largest_rank:
                rank = min(2 * rank, largest_rank)
                work = _grown(filled, work, sketch[:rank], eps)
            descent, uphill = _compare(filled, shrunk, before, unseen)
            final_steps += level <= goal
            enough = kind.type(tol) * goal
            if level <= goal and descent + drift <= enough * enough and final_steps >= next_proof:
                _difference(filled, shrunk, before)
                np.dot(before.T, before, gram)
                if _bounded(gram, size, goal * (one + kind.type(0.3 * tol))):
                    iterations[number], ranks[number] = steps, above
                    break
                # `before` has been used: momentum starts again, from the plain step.
                before[:] = shrunk
                uphill, next_proof, vain = one, final_steps + 3, vain + 1
            vain += above + 4 > largest_rank and level <= goal
            if vain >= few_steps:
                break
            momentum = 1.0 if uphill > 0 else momentum
            grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
            _extrapolate(a, unseen, shrunk, before, kind.type((momentum - 1) / grown), filled)
            momentum = grown
        for r in range(rows):
            for k in range(size):
                estimate[number, r, k] = shrunk[r, k] * scale


@compiled
def warm_each(
    x: Array,
    mask: NDArray[np.bool_],
    thresholds: Array,
    chosen: NDArray[np.int64],
    start: Array,
    sketch: Array,
    bases: Array,
    sizes: NDArray[np.int64],
    estimate: Array,
    iterations: NDArray[np.int64],
    ranks: NDArray[np.int64],
    settings: tuple[float, int, float, bool],
    eps: float,
    tiny: float,
) -> None:
    """As `low_rank_each`, for the `chosen` matrices, with the subspace that the last λ has ended with.

    The subspace of a matrix is the first of its `bases`, as many as `sizes` tells; none where that is 0. It is
    replaced by the one that this λ ends with. `start` holds the estimates to start at. `settings` holds tol, the
    most steps, the smallest ratio of λ to the norm that is solved here, and whether to prove that no singular
    value beyond λ was missed. Where steps do not suffice, `iterations` is 0 and `estimate` is left alone.
    """
    tol, most_steps, solvable, proven = settings
    rows, size = x.shape[1], x.shape[2]
    largest_rank, width = sketch.shape
    kind = x.dtype
    zero, one, least = kind.type(0), kind.type(1), kind.type(math.sqrt(tiny))
    big = (rows, width)
    a, unseen, filled = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    shrunk, before = np.zeros(big, kind), np.zeros(big, kind)
    gram = np.zeros((width, width) if proven else (0, 0), kind)
    for number in chosen:
        scale = scale_of(x[number], kind.type(tiny))
        total, seen = zero, zero
        goal = thresholds[number] / scale
        for r in range(rows):
            for k in range(size):
                entry = x[number, r, k] / scale
                a[r, k] = entry
                unseen[r, k] = not mask[number, r, k]
                total += entry * entry
                seen += one - unseen[r, k]
                before[r, k] = start[number, r, k] / scale
                filled[r, k] = entry + unseen[r, k] * before[r, k]
        norm = kind.type(math.sqrt(total * kind.type(rows * size) / max(seen, one)))
        iterations[number] = 0
        ranks[number] = 0
        rank = min(REGISTER, largest_rank)
        # A good start is not given up for what a subspace says that has just begun.
        unsettled = 2
        if sizes[number]:
            rank, unsettled = sizes[number], 0
        work = _subspace(rows, width, rank, kind)
        work[0][:] = bases[number, :rank] if sizes[number] else sketch[:rank]
        momentum, next_proof = 1.0, 0
        for step in range(1, (0 if goal < kind.type(solvable) * norm else most_steps) + 1):
            basis, left, product, vectors, core, mixed, values, scratch = work
            drift = _left_vectors(filled, work, goal, eps, least)
            np.dot(left.T, filled, product)
            np.dot(product, product.T, scratch[0])
            if not eigh(scratch, values, vectors, eps, tiny):
                break
            above = 0
            for k in range(rank):
                values[k] = math.sqrt(max(values[k], zero))
                above += values[k] > goal
                ratio = max(values[k] - goal, zero) / max(values[k], least)
                for i in range(rank):
                    mixed[k, i] = ratio * vectors[k, i]
            np.dot(vectors.T, mixed, core)
            np.dot(core, product, basis)
            np.dot(left, basis, shrunk)
            _right_vectors(work, least)
            if above + 4 > rank:
                if rank == largest_rank:
                    break
                rank = min(2 * rank, largest_rank)
                work = _grown(filled, work, sketch[:rank], eps)
                unsettled = max(unsettled, 1)
            if unsettled:
                unsettled -= 1
                continue
            descent, uphill = _compare(filled, shrunk, before, unseen)
            enough = kind.type(tol) * goal
            if descent + drift <= enough * enough and step >= next_proof:
                found = True
                if proven:
                    _difference(filled, shrunk, before)
                    np.dot(before.T, before, gram)
                    found = _bounded(gram, size, goal * (one + kind.type(0.3 * tol)))
                if found:
                    iterations[number], ranks[number], sizes[number] = step, above, rank
                    bases[number, :rank] = work[0]
                    for r in range(rows):
                        for k in range(size):
                            estimate[number, r, k] = shrunk[r, k] * scale
                    break
                # `before` has been used: momentum starts again, from the plain step.
                before[:] = shrunk
                uphill, next_proof = one, step + 3
            momentum = 1.0 if uphill > 0 else momentum
            grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
            _extrapolate(a, unseen, shrunk, before, kind.type((momentum - 1) / grown), filled)
            momentum = grown


@inlined
def _subspace(rows: int, width: int, rank: int, kind: Any) -> Any:
    """Right vectors (as rows), left vectors (as columns), left ones times the matrix, and small workspace."""
    small = (rank, rank)
    return (
        *(np.zeros((rank, width), kind), np.zeros((rows, rank), kind), np.zeros((rank, width), kind)),
        *(np.zeros(small, kind), np.zeros(small, kind), np.zeros(small, kind), np.ones(rank, kind)),
        scratch_for(rank, kind),
    )


@inlined
def _left_vectors(x: Array, work: Any, level: Number, eps: float, least: Number) -> Number:
    """An orthonormal basis of x times the right vectors; the square of what this changes in the shrunk matrix."""
    basis, left, _, _, _, _, values, _ = work
    rank = len(values)
    image = np.dot(x, basis.T)
    total = x.dtype.type(0)
    floor = max(x.dtype.type(1e-3) * values[rank - 1], least)
    for r in range(len(image)):
        for k in range(rank):
            length = max(values[k], floor)
            rest = (image[r, k] / length - left[r, k]) * max(values[k] - level, x.dtype.type(0))
            total += rest * rest
            # Of about unit length, so that weak directions are not lost beside strong ones.
            image[r, k] /= length
    np.dot(image, _orthonormalizing(np.dot(image.T, image), eps), left)
    return total


@inlined
def _right_vectors(work: Any, least: Number) -> None:
    """Turn both bases to singular vectors."""
    basis, left, product, vectors, _, mixed, values, _ = work
    rank = len(values)
    floor = max(values.dtype.type(1e-3) * values[rank - 1], least)
    for k in range(rank):
        length = max(values[k], floor)
        for i in range(rank):
            mixed[k, i] = vectors[k, i] / length
    np.dot(mixed, product, basis)
    left[:] = np.dot(left, vectors.T)


@inlined
def _grown(x: Array, work: Any, sketch: Array, eps: float) -> Any:
    """A larger subspace: new directions are one power iteration from random ones orthogonal to the old."""
    old, rank, before = work[0], len(sketch), len(work[0])
    found = _subspace(len(x), x.shape[1], rank, x.dtype)
    new = sketch[before:] - np.dot(np.dot(sketch[before:], old.T), old)
    new = np.dot(np.dot(new, x.T), x)
    for k in range(rank):
        # Values ascend.
        place = k - (rank - before)
        if place >= 0:
            found[0][k], found[6][k] = old[place], work[6][place]
            found[1][:, k] = work[1][:, place]
        else:
            square = x.dtype.type(0)
            for i in range(new.shape[1]):
                square += new[k, i] * new[k, i]
            found[0][k] = new[k] / max(x.dtype.type(math.sqrt(square)), x.dtype.type(eps))
            found[6][k] = work[6][0]
    return found


@inlined
def _orthonormalizing(gram: Array, eps: float) -> Array:
    """The inverse, transposed, of the Cholesky factor of a Gram matrix, with a ridge of rounding errors."""
    rank = len(gram)
    kind = gram.dtype
    ridge = kind.type(1e-30)
    for k in range(rank):
        ridge = max(ridge, kind.type(10 * eps) * gram[k, k])
    inverse = np.zeros((rank, rank), kind)
    for i in range(rank):
        gram[i, i] += ridge
        for j in range(i + 1):
            rest = gram[i, j]
            for k in range(j):
                rest -= gram[i, k] * gram[j, k]
            gram[i, j] = math.sqrt(max(rest, ridge)) if i == j else rest / gram[j, j]
    for i in range(rank):
        inverse[i, i] = kind.type(1) / gram[i, i]
        for k in range(i):
            for j in range(k + 1):
                inverse[i, j] -= gram[i, k] * inverse[k, j]
        for j in range(i):
            inverse[i, j] /= gram[i, i]
    return np.ascontiguousarray(inverse.T)


@inlined
def _bounded(gram: Array, size: int, bound: Number) -> bool:
    """Whether all eigenvalues of `gram` are below bound²: whether bound²·I − gram has a Cholesky factor.

    By blocks of rows, so that most of the work is a product of matrices. `gram` is overwritten.
    """
    width = gram.shape[1]
    zero = gram.dtype.type(0)
    for i in range(width):
        for j in range(width):
            gram[i, j] = -gram[i, j]
        gram[i, i] += bound * bound
    for first in range(0, size, REGISTER):
        last = min(first + REGISTER, size)
        if first:
            panel = np.ascontiguousarray(gram[first:, :first])
            gram[first:, first:last] -= np.dot(panel, panel[: last - first].T)
        for j in range(first, last):
            pivot = gram[j, j]
            for k in range(first, j):
                pivot -= gram[j, k] * gram[j, k]
            if not pivot > zero:
                return False
            root = math.sqrt(pivot)
            for i in range(j, width):
                rest = gram[i, j]
                for k in range(first, j):
                    rest -= gram[i, k] * gram[j, k]
                gram[i, j] = rest / root
    return True


@inlined
def _compare(filled: Array, shrunk: Array, before: Array, unseen: Array) -> tuple[Number, Number]:
    """The square of the gradient, and whether the last step points uphill (then positive)."""
    square, along = filled.dtype.type(0), filled.dtype.type(0)
    for r in range(filled.shape[0]):
        for k in range(filled.shape[1]):
            step = unseen[r, k] * (shrunk[r, k] - filled[r, k])
            square += step * step
            along -= step * (shrunk[r, k] - before[r, k])
    return square, along


@inlined
def _difference(filled: Array, shrunk: Array, out: Array) -> None:
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[r, k] = filled[r, k] - shrunk[r, k]


@inlined
def _extrapolate(a: Array, unseen: Array, shrunk: Array, before: Array, momentum: Number, filled: Array) -> None:
    """Fill the matrix with the estimate and its momentum; what is shrunk becomes what was before."""
    for r in range(filled.shape[0]):
        for k in range(filled.shape[1]):
            now = shrunk[r, k]
            filled[r, k] = a[r, k] + unseen[r, k] * (now + momentum * (now - before[r, k]))
            before[r, k] = now
