"""The solver of `baselines/total_variation.py` for one image after another; see there for the method.

Differences between rows and between columns are padded with a zero at both ends, so that loops run over whole
rows. The norms that a step needs are summed up while the step before writes the entries.
"""

import math

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import Array, Number, compiled, inlined, local_average

_CHECKS = 2


@compiled
def minimize_each(
    x: Array,
    mask: NDArray[np.bool_],
    basis: Array,
    frequencies: Array,
    settings: tuple[float, float, int, float, float, float, int, float],
    estimate: Array,
    states: tuple[Array, Array, Array],
) -> None:
    """Solve each problem. In `basis` the operator DᵀD along a row is diagonal, with `frequencies`.

    `settings` holds weight, tol, max_iter, the step sizes of differences and of the residual, the relaxation, the
    iterations between checks, and how far the last step may move the state. `states` receives the final states
    on the common scale, unless it is empty.
    """
    weight, tol, max_iter, step_of_differences, step_of_residual, relaxation, check_every, movement = settings
    height, width = x.shape[1], x.shape[2]
    kind = x.dtype
    shape = (height, width)
    target, seen, unseen = np.empty(shape, kind), np.empty(shape, kind), np.empty(shape, kind)
    whole, right, spare, z = (
        np.empty(shape, kind),
        np.empty(shape, kind),
        np.empty(shape, kind),
        np.empty(shape, kind),
    )
    rows, columns = np.empty((height + 1, width), kind), np.empty((height, width + 1), kind)
    of_rows, of_columns = np.empty(height + 1, kind), np.empty(width + 1, kind)
    threshold, residual_threshold = kind.type(1 / step_of_differences), kind.type(1 / step_of_residual)
    ratio = kind.type(step_of_residual / (step_of_differences * weight))
    over, zero, one, least = kind.type(relaxation), kind.type(0), kind.type(1), kind.type(1e-24)
    inverses, turned = _pivots(height, frequencies, ratio), basis.T.copy()
    line, squares = np.empty(width + 1, kind), np.empty(width + 1, kind)
    history = np.empty(_CHECKS, np.float64)
    for number in range(len(x)):
        for i in range(height):
            for j in range(width):
                seen[i, j] = mask[number, i, j]
                unseen[i, j] = not mask[number, i, j]
                target[i, j] = x[number, i, j] if mask[number, i, j] else zero
        local_average(target, unseen, width, z)
        _differences(z, rows, columns, of_rows, of_columns)
        groups = max(1, height + width - 2)
        scale = kind.type(max(1.5 * (_sum_of_roots(of_rows) + _sum_of_roots(of_columns)) / groups, 1e-3))
        square = _start(target, seen, z, scale, threshold, of_rows, of_columns, whole, rows, columns)
        history[:] = np.inf
        for iteration in range(1, max_iter + 1):
            # From squared norms to the fractions that the proximal maps remove.
            fraction = min(residual_threshold / math.sqrt(max(square, least)), one)
            for i in range(height + 1):
                of_rows[i] = min(threshold / math.sqrt(max(of_rows[i], least)), one)
            for j in range(width + 1):
                of_columns[j] = min(threshold / math.sqrt(max(of_columns[j], least)), one)
            _reflect(target, seen, whole, rows, columns, fraction, of_rows, of_columns, one / ratio, right)
            np.dot(right, turned, spare)
            _solve(inverses, ratio, spare)
            np.dot(spare, basis, z)
            done = iteration == max_iter
            if done or iteration % check_every == 0:
                # `spare` and `right` are free now, and the fractions still known.
                _settle(z, target, seen, fraction == one, spare)
                now = _objective(spare, target, seen, weight)
                joined = _join(spare, of_rows, of_columns, right)
                if joined:
                    of_joined = _objective(right, target, seen, weight)
                    joined = of_joined < now
                    now = min(now, of_joined)
                calm, later = True, now
                for check in range(_CHECKS - 1, -1, -1):
                    calm = calm and abs(later - history[check]) <= tol * now
                    later = history[check]
                for check in range(_CHECKS - 1):
                    history[check] = history[check + 1]
                history[_CHECKS - 1] = now
                if calm:
                    square = _length(target, seen, z, fraction, ratio, of_rows, of_columns, whole, rows, columns)
                    done = done or over * math.sqrt(square) <= movement * tol * now
            square = _relax(
                target, seen, z, fraction, over, of_rows, of_columns, whole, rows, columns, line, squares
            )
            if done:
                break
        found = right if joined else spare
        for i in range(height):
            for j in range(width):
                estimate[number, i, j] = found[i, j] * scale
        if len(states[0]):
            states[0][number] = whole
            states[1][number] = rows[1:height]
            states[2][number] = columns[:, 1:width]


@inlined
def _pivots(height: int, frequencies: Array, ratio: Number) -> Array:
    """One over the pivots of ratio + frequency + DᵀD, tridiagonal along a column, for each frequency."""
    inverses = np.empty((height, len(frequencies)), frequencies.dtype)
    for i in range(height):
        neighbors = (i > 0) + (i < height - 1)
        for k in range(len(frequencies)):
            pivot = ratio + frequencies[k] + neighbors
            if i:
                pivot -= inverses[i - 1, k]
            inverses[i, k] = 1 / pivot
    return inverses


@inlined
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


@inlined
def _differences(z: Array, rows: Array, columns: Array, of_rows: Array, of_columns: Array) -> None:
    """The differences between rows and between columns, and their squared norms."""
    height, width = z.shape
    rows[:] = 0
    columns[:] = 0
    of_rows[:] = 0
    of_columns[:] = 0
    for i in range(1, height):
        total = z.dtype.type(0)
        for j in range(width):
            difference = z[i, j] - z[i - 1, j]
            rows[i, j] = difference
            total += difference * difference
        of_rows[i] = total
    for i in range(height):
        for j in range(1, width):
            difference = z[i, j] - z[i, j - 1]
            columns[i, j] = difference
            of_columns[j] += difference * difference


@inlined
def _sum_of_roots(squares: Array) -> float:
    total = 0.0
    for square in squares:
        total += math.sqrt(square)
    return total


@inlined
def _start(
    target: Array,
    seen: Array,
    z: Array,
    scale: Number,
    threshold: Number,
    of_rows: Array,
    of_columns: Array,
    whole: Array,
    rows: Array,
    columns: Array,
) -> Number:
    """Scale everything. The state is z and its differences, longer by what the first step removes.

    Observed entries of z are those of the image: the residual, whose square is returned, is zero.
    """
    height, width = z.shape
    for i in range(height):
        for j in range(width):
            target[i, j] /= scale
            whole[i, j] = z[i, j] / scale
            whole[i, j] += seen[i, j] * (target[i, j] - whole[i, j])
    for i in range(height + 1):
        size = math.sqrt(of_rows[i]) / scale
        longer = (1 + threshold / size) / scale if size > 1e-12 else 0.0
        for j in range(width):
            rows[i, j] *= longer
        of_rows[i] *= longer * longer
    for j in range(width + 1):
        size = math.sqrt(of_columns[j]) / scale
        longer = (1 + threshold / size) / scale if size > 1e-12 else 0.0
        for i in range(height):
            columns[i, j] *= longer
        of_columns[j] *= longer * longer
    return target.dtype.type(0)


@inlined
def _reflect(
    target: Array,
    seen: Array,
    whole: Array,
    rows: Array,
    columns: Array,
    fraction: Number,
    of_rows: Array,
    of_columns: Array,
    inverse: Number,
    right: Array,
) -> None:
    """The right-hand side of the system that couples the reflections of the residual and of all differences."""
    height, width = whole.shape
    twice, double = fraction + fraction, inverse + inverse
    for i in range(height):
        above, below = inverse - double * of_rows[i], inverse - double * of_rows[i + 1]
        for j in range(width):
            right[i, j] = (
                whole[i, j]
                - twice * (whole[i, j] - target[i, j]) * seen[i, j]
                + above * rows[i, j]
                - below * rows[i + 1, j]
            )
        for j in range(width):
            right[i, j] += (inverse - double * of_columns[j]) * columns[i, j] - (
                inverse - double * of_columns[j + 1]
            ) * columns[i, j + 1]


@inlined
def _relax(
    target: Array,
    seen: Array,
    z: Array,
    fraction: Number,
    over: Number,
    of_rows: Array,
    of_columns: Array,
    whole: Array,
    rows: Array,
    columns: Array,
    line: Array,
    squares: Array,
) -> Number:
    """Replace the state by the one after a step, and fractions by the new squared norms.

    Returns the squared norm of the residual.
    """
    height, width = z.shape
    under = z.dtype.type(1) - over
    square = target.dtype.type(0)
    squares[:] = 0
    for i in range(height):
        for j in range(width):
            cut = fraction * (whole[i, j] - target[i, j]) * seen[i, j]
            value = under * whole[i, j] + over * (z[i, j] + cut)
            whole[i, j] = value
            residual = (value - target[i, j]) * seen[i, j]
            square += residual * residual
        # With its first entry repeated, a row has a zero difference before the first column.
        line[0] = z[i, 0]
        for j in range(width):
            line[j + 1] = z[i, j]
        for j in range(width):
            value = (under + over * of_columns[j]) * columns[i, j] + over * (line[j + 1] - line[j])
            columns[i, j] = value
            squares[j] += value * value
    for i in range(1, height):
        stay, total = under + over * of_rows[i], target.dtype.type(0)
        for j in range(width):
            value = stay * rows[i, j] + over * (z[i, j] - z[i - 1, j])
            rows[i, j] = value
            total += value * value
        of_rows[i] = total
    of_rows[0] = of_rows[height] = 0
    of_columns[:] = squares
    return square


@inlined
def _length(
    target: Array,
    seen: Array,
    z: Array,
    fraction: Number,
    ratio: Number,
    of_rows: Array,
    of_columns: Array,
    whole: Array,
    rows: Array,
    columns: Array,
) -> Number:
    """The squared length of the step that `_relax` will take, without relaxation."""
    height, width = z.shape
    one = z.dtype.type(1)
    total = z.dtype.type(0)
    for i in range(height):
        for j in range(width):
            step = z[i, j] - whole[i, j] + fraction * (whole[i, j] - target[i, j]) * seen[i, j]
            total += ratio * step * step
        for j in range(1, width):
            step = z[i, j] - z[i, j - 1] - (one - of_columns[j]) * columns[i, j]
            total += step * step
    for i in range(1, height):
        stay = one - of_rows[i]
        for j in range(width):
            step = z[i, j] - z[i - 1, j] - stay * rows[i, j]
            total += step * step
    return total


@inlined
def _settle(z: Array, target: Array, seen: Array, exact: bool, out: Array) -> None:
    """`z`, with observed entries put back if the step left no residual: z only converges to them."""
    height, width = z.shape
    back = z.dtype.type(exact)
    for i in range(height):
        for j in range(width):
            out[i, j] = z[i, j] + back * seen[i, j] * (target[i, j] - z[i, j])


@inlined
def _join(z: Array, of_rows: Array, of_columns: Array, out: Array) -> bool:
    """Average `z` over rows and columns whose difference was removed entirely; False if there are none."""
    height, width = z.shape
    some = False
    for i in range(1, height):
        some = some or of_rows[i] == 1
    for j in range(1, width):
        some = some or of_columns[j] == 1
    if not some:
        return False
    top = 0
    for bottom in range(1, height + 1):
        if bottom < height and of_rows[bottom] == 1:
            continue
        line = out[top]
        line[:] = z[top]
        for i in range(top + 1, bottom):
            for j in range(width):
                line[j] += z[i, j]
        left = 0
        for right in range(1, width + 1):
            if right < width and of_columns[right] == 1:
                continue
            total = z.dtype.type(0)
            for j in range(left, right):
                total += line[j]
            total /= (bottom - top) * (right - left)
            for j in range(left, right):
                line[j] = total
            left = right
        for i in range(top + 1, bottom):
            out[i] = line
        top = bottom
    return True


@inlined
def _objective(z: Array, target: Array, seen: Array, weight: float) -> float:
    height, width = z.shape
    square, variation = z.dtype.type(0), 0.0
    squares = np.zeros(width, z.dtype)
    for i in range(height):
        for j in range(width):
            residual = (z[i, j] - target[i, j]) * seen[i, j]
            square += residual * residual
        for j in range(1, width):
            difference = z[i, j] - z[i, j - 1]
            squares[j] += difference * difference
        if i:
            total = z.dtype.type(0)
            for j in range(width):
                difference = z[i, j] - z[i - 1, j]
                total += difference * difference
            variation += math.sqrt(total)
    return math.sqrt(square) + weight * (variation + _sum_of_roots(squares))
