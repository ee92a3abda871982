"""The splitting of `baselines/total_variation.py` for one image after another; see there for what it does."""

import math

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import Array, Number, compiled, local_average

_CHECKS = 3


@compiled
def minimise_each(
    x: Array,
    mask: NDArray[np.bool_],
    basis: Array,
    frequencies: Array,
    settings: tuple[float, float, int, float, float, float, int],
    estimate: Array,
    states: tuple[Array, Array, Array],
) -> None:
    """Solve each. In `basis` differences along a row are diagonal, with `frequencies`.

    The numbers of `settings` are weight, tol, max_iter, the steps of differences and of the residual, the
    relaxation, and how often to check. `states` receives what the estimates stand for on the common scale, if
    there is room for it.
    """
    weight, tol, max_iter, step_of_differences, step_of_residual, relaxation, check_every = settings
    height, width = x.shape[1], x.shape[2]
    kind = x.dtype
    shape = (height, width)
    target, seen, unseen = np.empty(shape, kind), np.empty(shape, kind), np.empty(shape, kind)
    whole, cut, right, spare, z = (
        np.empty(shape, kind),
        np.empty(shape, kind),
        np.empty(shape, kind),
        np.empty(shape, kind),
        np.empty(shape, kind),
    )
    rows, columns = np.empty((height - 1, width), kind), np.empty((height, width - 1), kind)
    of_rows, of_columns = np.empty(height - 1, kind), np.empty(width - 1, kind)
    level, residual_level = kind.type(1 / step_of_differences), kind.type(1 / step_of_residual)
    ratio = kind.type(step_of_residual / (step_of_differences * weight))
    over = kind.type(relaxation)
    inverses = _pivots(height, frequencies, ratio)
    history = np.empty(_CHECKS, np.float64)
    for number in range(len(x)):
        for i in range(height):
            for j in range(width):
                seen[i, j] = mask[number, i, j]
                unseen[i, j] = not mask[number, i, j]
                target[i, j] = x[number, i, j]
        local_average(target, unseen, width, z)
        _sizes(z, of_rows, of_columns)
        groups = max(1, height + width - 2)
        scale = kind.type(max(1.5 * (of_rows.sum() + of_columns.sum()) / groups, 1e-3))
        _start(target, seen, z, scale, level, of_rows, of_columns, whole, rows, columns)
        history[:] = np.inf
        for iteration in range(1, max_iter + 1):
            exact = _reflect(
                target, seen, whole, rows, columns, level, residual_level, ratio, cut, right, of_rows, of_columns
            )
            np.dot(right, basis.T, spare)
            _solve(inverses, ratio, spare)
            np.dot(spare, basis, z)
            _relax(z, cut, over, of_rows, of_columns, whole, rows, columns)
            last = iteration == max_iter
            if not last and iteration % check_every:
                continue
            if exact:
                # Kept entries come back where no residual is left: there z only nears them.
                for i in range(height):
                    for j in range(width):
                        z[i, j] += seen[i, j] * (target[i, j] - z[i, j])
            now = _objective(z, target, seen, weight)
            # Where a residual stays, the objective nears its end more slowly.
            least = tol * now * (1.0 if exact else 0.2)
            calm, later = True, now
            for check in range(_CHECKS - 1, -1, -1):
                calm = calm and abs(later - history[check]) <= least
                later = history[check]
            for check in range(_CHECKS - 1):
                history[check] = history[check + 1]
            history[_CHECKS - 1] = now
            if last or calm:
                break
        for i in range(height):
            for j in range(width):
                estimate[number, i, j] = z[i, j] * scale
        if len(states[0]):
            states[0][number] = whole
            states[1][number] = rows
            states[2][number] = columns


@compiled
def _pivots(height: int, frequencies: Array, ratio: Number) -> Array:
    """One over the pivots of ratio + frequency + DᵀD, tridiagonal along a column, for each frequency."""
    inverses = np.empty((height, len(frequencies)), frequencies.dtype)
    for i in range(height):
        neighbours = (i > 0) + (i < height - 1)
        for k in range(len(frequencies)):
            pivot = ratio + frequencies[k] + neighbours
            if i:
                pivot -= inverses[i - 1, k]
            inverses[i, k] = 1 / pivot
    return inverses


@compiled
def _solve(inverses: Array, ratio: Number, right: Array) -> None:
    """(1 + (frequency + DᵀD)/ratio)⁻¹ of each column, in its place."""
    height, width = right.shape
    for k in range(width):
        right[0, k] *= ratio
    for i in range(1, height):
        for k in range(width):
            right[i, k] = ratio * right[i, k] + right[i - 1, k] * inverses[i - 1, k]
    for k in range(width):
        right[height - 1, k] *= inverses[height - 1, k]
    for i in range(height - 2, -1, -1):
        for k in range(width):
            right[i, k] = (right[i, k] + right[i + 1, k]) * inverses[i, k]


@compiled
def _sizes(z: Array, of_rows: Array, of_columns: Array) -> None:
    """The norms of the differences between rows and between columns."""
    height, width = z.shape
    for j in range(width - 1):
        of_columns[j] = 0
    for i in range(height):
        for j in range(width - 1):
            difference = z[i, j + 1] - z[i, j]
            of_columns[j] += difference * difference
    for j in range(width - 1):
        of_columns[j] = math.sqrt(of_columns[j])
    for i in range(height - 1):
        square = z.dtype.type(0)
        for j in range(width):
            difference = z[i + 1, j] - z[i, j]
            square += difference * difference
        of_rows[i] = math.sqrt(square)


@compiled
def _start(
    target: Array,
    seen: Array,
    z: Array,
    scale: Number,
    level: Number,
    of_rows: Array,
    of_columns: Array,
    whole: Array,
    rows: Array,
    columns: Array,
) -> None:
    """Bring all to the common scale. The state is z and its differences, longer by what the first step cuts."""
    height, width = z.shape
    one, least = z.dtype.type(1), z.dtype.type(1e-12)
    for i in range(height):
        for j in range(width):
            target[i, j] /= scale
            z[i, j] /= scale
            whole[i, j] = z[i, j] + seen[i, j] * (target[i, j] - z[i, j])
    for i in range(height - 1):
        longer = one + level / max(of_rows[i] / scale, least)
        for j in range(width):
            rows[i, j] = (z[i + 1, j] - z[i, j]) * longer
    for j in range(width - 1):
        of_columns[j] = one + level / max(of_columns[j] / scale, least)
    for i in range(height):
        for j in range(width - 1):
            columns[i, j] = (z[i, j + 1] - z[i, j]) * of_columns[j]


@compiled
def _reflect(
    target: Array,
    seen: Array,
    whole: Array,
    rows: Array,
    columns: Array,
    level: Number,
    residual_level: Number,
    ratio: Number,
    cut: Array,
    right: Array,
    of_rows: Array,
    of_columns: Array,
) -> bool:
    """What is cut of the residual and of each difference, and the right side of the system that joins them.

    Says whether all of the residual is cut.
    """
    height, width = whole.shape
    one, two, least = cut.dtype.type(1), cut.dtype.type(2), cut.dtype.type(1e-24)
    square = cut.dtype.type(0)
    for i in range(height):
        for j in range(width):
            value = (whole[i, j] - target[i, j]) * seen[i, j]
            cut[i, j] = value
            square += value * value
    share = min(residual_level / math.sqrt(max(square, least)), one)
    for i in range(height):
        for j in range(width):
            value = cut[i, j] * share
            cut[i, j] = value
            right[i, j] = whole[i, j] - two * value
    for i in range(height - 1):
        total = cut.dtype.type(0)
        for j in range(width):
            total += rows[i, j] * rows[i, j]
        of_rows[i] = min(level / math.sqrt(max(total, least)), one)
        factor = (one - two * of_rows[i]) / ratio
        for j in range(width):
            value = rows[i, j] * factor
            right[i + 1, j] += value
            right[i, j] -= value
    for j in range(width - 1):
        of_columns[j] = 0
    for i in range(height):
        for j in range(width - 1):
            of_columns[j] += columns[i, j] * columns[i, j]
    for j in range(width - 1):
        of_columns[j] = min(level / math.sqrt(max(of_columns[j], least)), one)
    inverse = one / ratio
    for i in range(height):
        for j in range(width - 1):
            right[i, j + 1] += columns[i, j] * (inverse - two * inverse * of_columns[j])
        for j in range(width - 1):
            right[i, j] -= columns[i, j] * (inverse - two * inverse * of_columns[j])
    return share == one


@compiled
def _relax(
    z: Array,
    cut: Array,
    over: Number,
    of_rows: Array,
    of_columns: Array,
    whole: Array,
    rows: Array,
    columns: Array,
) -> None:
    """The state after a step."""
    height, width = z.shape
    one = z.dtype.type(1)
    under = one - over
    for i in range(height):
        for j in range(width):
            whole[i, j] = under * whole[i, j] + over * (z[i, j] + cut[i, j])
    for i in range(height - 1):
        stay = under + over * of_rows[i]
        for j in range(width):
            rows[i, j] = stay * rows[i, j] + over * (z[i + 1, j] - z[i, j])
    for i in range(height):
        for j in range(width - 1):
            columns[i, j] = (under + over * of_columns[j]) * columns[i, j] + over * (z[i, j + 1] - z[i, j])


@compiled
def _objective(z: Array, target: Array, seen: Array, weight: float) -> float:
    height, width = z.shape
    of_rows, of_columns = np.empty(height - 1, z.dtype), np.empty(width - 1, z.dtype)
    _sizes(z, of_rows, of_columns)
    square = z.dtype.type(0)
    for i in range(height):
        for j in range(width):
            residual = (z[i, j] - target[i, j]) * seen[i, j]
            square += residual * residual
    return math.sqrt(square) + weight * (of_rows.sum() + of_columns.sum())
