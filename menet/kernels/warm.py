"""Completion of matrices of low rank for one λ of a path after another; `estimators/path.py` calls it."""

import math

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import REGISTER, Array, compiled, scale_of
from menet.kernels.eigenvectors import eigh
from menet.kernels.low_rank import (
    _bounded,
    _compare,
    _difference,
    _extrapolate,
    _grown,
    _left_vectors,
    _right_vectors,
    _subspace,
)


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
