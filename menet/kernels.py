"""Loops compiled by numba, for a CPU. Only imported where they are called: importing numba takes half a second.

The compiled code is kept beside this file (or in the user's cache folder), so that it is compiled once.
"""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Number = float | np.floating

# Rows are padded to whole vector registers, and loops run over the padding: shorter ones are no faster.
_REGISTER = 16
_ATTEMPTS = 40


def _compiled(function: Callable[..., Any]) -> Any:
    # Sums may be reordered and products fused, but NaN and infinity keep their meaning.
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "arcp", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep the compiled code
        return numba.njit(**options)(function)


@_compiled
def eigh_of_each(matrices: Array, values: Array, rows: Array, eps: float, tiny: float) -> bool:
    """Ascending eigenvalues and eigenvectors (as rows) of each symmetric matrix; False if one did not converge.

    With no columns in `rows`, the eigenvalues alone.
    """
    size, wanted = matrices.shape[1], rows.shape[2]
    kind = matrices.dtype
    width = _padded(size)
    basis, scratch = np.zeros((width, width if wanted else 0), kind), _scratch(size, kind)
    work = scratch[0]
    for number in range(len(matrices)):
        for i in range(size):
            for k in range(size):
                work[i, k] = matrices[number, i, k]
        if not _eigh(scratch, values[number], basis, eps, tiny):
            return False
        for i in range(size):
            for k in range(wanted):
                rows[number, i, k] = basis[i, k]
    return True


@_compiled
def _padded(size: int) -> int:
    return (size + _REGISTER - 1) // _REGISTER * _REGISTER


@_compiled
def _scratch(size: int, kind: Any) -> tuple[Array, Array, Array, Array, Array]:
    """What `_eigh` works in; the first is where it finds its matrix."""
    width = _padded(size)
    matrix = np.zeros((width, width), kind)
    return matrix, np.empty(size, kind), np.empty(size, kind), np.empty(width, kind), np.empty(width, kind)


@_compiled
def _eigh(
    scratch: tuple[Array, Array, Array, Array, Array], values: Array, basis: Array, eps: float, tiny: float
) -> bool:
    """Decompose the matrix in `scratch`, which is used up: ascending values, and vectors as rows of `basis`."""
    matrix, beside, weight, v, w = scratch
    size = len(values)
    kind = matrix.dtype
    # Entries are brought to at most 1: squares then neither overflow nor vanish.
    scale = kind.type(0)
    for i in range(size):
        for k in range(size):
            scale = max(scale, abs(matrix[i, k]))
    scale = max(scale, kind.type(tiny))
    for i in range(size):
        for k in range(size):
            matrix[i, k] /= scale
    _tridiagonal(matrix, values, beside, weight, v, w, kind.type(tiny))
    if basis.shape[1]:
        _accumulate(matrix, weight, basis)
    converged = _diagonal(values, beside, basis, kind.type(eps))
    _sort(values, basis)
    for i in range(size):
        values[i] *= scale
    return converged


@_compiled
def _tridiagonal(
    a: Array, diagonal: Array, beside: Array, weight: Array, v: Array, w: Array, tiny: float
) -> None:
    """Householder's reduction, from the last row up. Row i keeps the vector of its reflection, I − weight·vvᵀ."""
    size, width = len(diagonal), a.shape[1]
    zero, half, one = a.dtype.type(0), a.dtype.type(0.5), a.dtype.type(1)
    for i in range(size - 1, 0, -1):
        end = min((i + _REGISTER - 1) // _REGISTER * _REGISTER, width)
        diagonal[i] = a[i, i]
        for k in range(i, end):
            a[i, k] = zero
        square = zero
        for k in range(end):
            square += a[i, k] * a[i, k]
        last = a[i, i - 1]
        if square - last * last <= tiny:
            beside[i - 1] = last
            weight[i] = zero
            continue
        reflected = math.copysign(math.sqrt(square), -last)
        beside[i - 1] = reflected
        a[i, i - 1] = last - reflected
        scale = one / (square - last * reflected)
        weight[i] = scale
        for k in range(end):
            v[k] = a[i, k]
            w[k] = zero
        # w = weight·Av, four rows at a time so that w is read and written less often.
        whole = i // 4 * 4
        for r in range(0, whole, 4):
            v0, v1, v2, v3 = v[r] * scale, v[r + 1] * scale, v[r + 2] * scale, v[r + 3] * scale
            for k in range(end):
                w[k] += v0 * a[r, k] + v1 * a[r + 1, k] + v2 * a[r + 2, k] + v3 * a[r + 3, k]
        for r in range(whole, i):
            v0 = v[r] * scale
            for k in range(end):
                w[k] += v0 * a[r, k]
        for k in range(i, end):
            w[k] = zero
        along = zero
        for k in range(end):
            along += w[k] * v[k]
        along *= scale * half
        for k in range(end):
            w[k] -= along * v[k]
        for r in range(i):
            v0, w0 = v[r], w[r]
            for k in range(end):
                a[r, k] -= v0 * w[k] + w0 * v[k]
    diagonal[0] = a[0, 0]
    beside[size - 1] = zero


@_compiled
def _accumulate(a: Array, weight: Array, basis: Array) -> None:
    """The product of the reflections kept in the rows of `a`, transposed."""
    size, width = len(weight), a.shape[1]
    for i in range(size):
        for k in range(width):
            basis[i, k] = 0
        basis[i, i] = 1
    for i in range(1, size):
        scale = weight[i]
        if scale == 0:
            continue
        end = min((i + _REGISTER - 1) // _REGISTER * _REGISTER, width)
        for r in range(i):
            along = a.dtype.type(0)
            for k in range(end):
                along += basis[r, k] * a[i, k]
            along *= scale
            for k in range(end):
                basis[r, k] -= along * a[i, k]


@_compiled
def _diagonal(d: Array, e: Array, basis: Array, eps: float) -> bool:
    """The implicit QL iteration on a tridiagonal matrix, its rotations applied to the rows of `basis`."""
    size, width = len(d), basis.shape[1]
    zero, one, two = d.dtype.type(0), d.dtype.type(1), d.dtype.type(2)
    for low in range(size):
        settled = False
        for _ in range(_ATTEMPTS):
            high = low
            while high < size - 1 and abs(e[high]) > eps * (abs(d[high]) + abs(d[high + 1])):
                high += 1
            if high == low:
                settled = True
                break
            # Wilkinson's shift.
            g = (d[low + 1] - d[low]) / (two * e[low])
            g = d[high] - d[low] + e[low] / (g + math.copysign(math.sqrt(g * g + one), g))
            s, c, p = one, one, zero
            for i in range(high - 1, low - 1, -1):
                f, b = s * e[i], c * e[i]
                r = math.sqrt(f * f + g * g)
                e[i + 1] = r
                if r > zero:
                    s, c = f / r, g / r
                else:
                    s, c = zero, one
                g = d[i + 1] - p
                r = (d[i] - g) * s + two * c * b
                p = s * r
                d[i + 1] = g + p
                g = c * r - b
                for k in range(width):
                    above, below = basis[i, k], basis[i + 1, k]
                    basis[i, k] = c * above - s * below
                    basis[i + 1, k] = s * above + c * below
            d[low] -= p
            e[low] = g
            e[high] = zero
        if not settled:
            return False
    return True


@_compiled
def _sort(values: Array, rows: Array) -> None:
    """Bring the values, and the rows with them, into ascending order; few are out of it."""
    for last in range(1, len(values)):
        i = last
        while i > 0 and values[i - 1] > values[i]:
            values[i - 1], values[i] = values[i], values[i - 1]
            for k in range(rows.shape[1]):
                rows[i - 1, k], rows[i, k] = rows[i, k], rows[i - 1, k]
            i -= 1


@_compiled
def complete_each(
    x: Array,
    mask: NDArray[np.bool_],
    threshold: Array,
    estimate: Array,
    iterations: NDArray[np.int64],
    settings: tuple[float, int, int, int, int, float, float],
    eps: float,
    tiny: float,
) -> bool:
    """The solver of `estimators/solver.py` for one matrix after another; see there for what it does and why.

    The numbers of `settings` are tol, max_iter, the first gradient steps, Newton's steps, the iterations inside
    each, the damping and the first momentum. False if an eigenvalue iteration did not converge.
    """
    tol, max_iter, first_steps, newton_steps, inner_iterations, first_damping, first_momentum = settings
    rows, size = x.shape[1], x.shape[2]
    width = _padded(size)
    kind = x.dtype
    one = kind.type(1)
    big, small = (rows, width), (width, width)
    a, unseen, filled, point = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    shrunk, before_shrunk = np.zeros(big, kind), np.zeros(big, kind)
    stepped, before_stepped = np.zeros(big, kind), np.zeros(big, kind)
    left, direction, residual = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    image, turned_image = np.zeros(big, kind), np.zeros(big, kind)
    basis, turned, core = np.zeros(small, kind), np.zeros(small, kind), np.zeros(small, kind)
    same, crossed = np.zeros(small, kind), np.zeros(small, kind)
    inside, mixed = np.zeros(small, kind), np.zeros(small, kind)
    values, ratio = np.empty(size, kind), np.empty(size, kind)
    scratch = _scratch(size, kind)
    for number in range(len(x)):
        level = threshold[number]
        for r in range(rows):
            for k in range(size):
                a[r, k] = x[number, r, k]
                unseen[r, k] = not mask[number, r, k]
        _local_average(a, unseen, size, filled)
        damping = first_damping
        used, steps, taken = 0, first_steps, 0
        while True:
            steps = min(steps, max_iter - used - 1)
            momentum: Number = first_momentum
            point[:] = filled
            for _ in range(steps):
                if not _decompose(point, values, basis, scratch, eps, tiny):
                    return False
                _shrinkage(values, basis, level, ratio, mixed, core, tiny)
                np.dot(point, core, shrunk)
                _fill(a, unseen, shrunk, stepped)
                if _inner_difference(point, stepped, filled) > 0:
                    momentum = one
                grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
                _extrapolate(stepped, filled, kind.type((momentum - 1) / grown), point)
                momentum = grown
                filled, stepped = stepped, filled
            used += steps
            limit = min(newton_steps, max_iter - used)
            last_size = np.inf
            for step in range(1, limit + 1):
                if not _decompose(filled, values, basis, scratch, eps, tiny):
                    return False
                _shrinkage(values, basis, level, ratio, mixed, core, tiny)
                np.dot(filled, core, shrunk)
                _fill(a, unseen, shrunk, stepped)
                square = _downhill(stepped, filled, residual)
                length = max(math.sqrt(_square(shrunk)), 1e-30)
                gradient = math.sqrt(square)
                finished = gradient <= 4 * eps * length
                if step > 1 and not (gradient < last_size or finished):
                    break
                shrunk, before_shrunk = before_shrunk, shrunk
                stepped, before_stepped = before_stepped, stepped
                if finished or gradient <= tol * length:
                    taken = step
                    break
                if step == limit:
                    break
                _derivative(filled, values, basis, level, ratio, turned, same, crossed, left, mixed, eps, tiny)
                added = kind.type(1 + damping * gradient / length)
                # Conjugate gradients; the residual starts as the downhill direction, the solution as zero.
                direction[:] = residual
                goal = square * kind.type(0.01)
                for _ in range(inner_iterations):
                    if not square > goal:
                        break
                    np.dot(left.T, direction, mixed)
                    np.dot(mixed, turned, inside)
                    for i in range(size):
                        for k in range(size):
                            mixed[i, k] = same[i, k] * inside[i, k] + crossed[i, k] * inside[k, i]
                    np.dot(mixed, basis, inside)
                    np.dot(direction, core, image)
                    np.dot(left, inside, turned_image)
                    curvature = _hessian(direction, unseen, added, image, turned_image)
                    if not curvature > 0:
                        break
                    along = square / curvature
                    smaller = _advance(filled, residual, direction, image, along)
                    _turn(direction, residual, smaller / square)
                    square = smaller
                last_size = gradient
            filled, before_stepped = before_stepped, filled
            if taken or used + newton_steps >= max_iter:
                break
            used += newton_steps
            steps, damping = 2 * steps, 8 * damping
        iterations[number] = used + taken if taken else max_iter
        for r in range(rows):
            for k in range(size):
                estimate[number, r, k] = before_shrunk[r, k]
    return True


@_compiled
def _decompose(x: Array, values: Array, basis: Array, scratch: Any, eps: float, tiny: float) -> bool:
    """Singular values and right singular vectors (as rows of `basis`) of a tall matrix."""
    np.dot(x.T, x, scratch[0])
    converged = _eigh(scratch, values, basis, eps, tiny)
    for k in range(len(values)):
        values[k] = math.sqrt(max(values[k], x.dtype.type(0)))
    return converged


@_compiled
def _shrinkage(
    values: Array, basis: Array, level: float, ratio: Array, scaled: Array, core: Array, tiny: float
) -> None:
    """The core with which x·core is the shrunk x, and what share of each singular value it leaves."""
    size, width = len(values), basis.shape[1]
    zero, least = values.dtype.type(0), values.dtype.type(math.sqrt(tiny))
    for k in range(size):
        ratio[k] = max(values[k] - level, zero) / max(values[k], least)
        for j in range(width):
            scaled[k, j] = ratio[k] * basis[k, j]
    np.dot(basis.T, scaled, core)


@_compiled
def _derivative(
    x: Array,
    values: Array,
    basis: Array,
    level: float,
    ratio: Array,
    turned: Array,
    same: Array,
    crossed: Array,
    left: Array,
    scaled: Array,
    eps: float,
    tiny: float,
) -> None:
    """What `linalg.shrink_derivative` has: left vectors, and the two coefficients of each pair of values."""
    size = len(values)
    kind = values.dtype
    zero, half, least = kind.type(0), kind.type(0.5), kind.type(math.sqrt(tiny))
    largest = values[size - 1]
    negligible = max(kind.type(math.sqrt(eps)) * largest, least)
    close = kind.type(10 * eps) * largest + least
    for k in range(size):
        inverse = kind.type(1) / values[k] if values[k] > negligible else zero
        for i in range(size):
            turned[i, k] = basis[k, i]
            scaled[i, k] = basis[k, i] * inverse
    np.dot(x, scaled, left)
    for i in range(size):
        for k in range(size):
            high, low = max(values[i], level), max(values[k], level)
            both = close if values[i] >= level and values[k] >= level else zero
            slope = (abs(high - low) + both) / (abs(values[i] - values[k]) + close)
            skew = (high - level + low - level) / max(values[i] + values[k], least)
            same[i, k] = half * (slope + skew) - ratio[k]
            crossed[i, k] = half * (slope - skew)


@_compiled
def _local_average(a: Array, unseen: Array, size: int, out: Array) -> None:
    """`a`, and in its unseen entries what `solver.local_average` says."""
    rows = len(a)
    kind = a.dtype
    one, little = kind.type(1), kind.type(0.1)
    seen, total = kind.type(0), kind.type(0)
    for r in range(rows):
        for k in range(size):
            total += a[r, k]
            seen += one - unseen[r, k]
    mean = total / max(seen, one)
    sums, counts = np.zeros(size + 2, kind), np.zeros(size + 2, kind)
    for r in range(rows):
        top, bottom = max(r - 1, 0), min(r + 1, rows - 1)
        for k in range(size):
            sums[k + 1] = kind.type(0)
            counts[k + 1] = kind.type(0)
        for near in range(top, bottom + 1):
            for k in range(size):
                sums[k + 1] += a[near, k]
                counts[k + 1] += one - unseen[near, k]
        for k in range(size):
            above = sums[k] + sums[k + 1] + sums[k + 2] + little * mean
            out[r, k] = a[r, k] + unseen[r, k] * above / (counts[k] + counts[k + 1] + counts[k + 2] + little)


@_compiled
def _fill(a: Array, unseen: Array, estimate: Array, out: Array) -> None:
    for r in range(a.shape[0]):
        for k in range(a.shape[1]):
            out[r, k] = a[r, k] + unseen[r, k] * estimate[r, k]


@_compiled
def _inner_difference(point: Array, stepped: Array, previous: Array) -> Number:
    total = point.dtype.type(0)
    for r in range(point.shape[0]):
        for k in range(point.shape[1]):
            total += (point[r, k] - stepped[r, k]) * (stepped[r, k] - previous[r, k])
    return total


@_compiled
def _extrapolate(stepped: Array, previous: Array, momentum: float, out: Array) -> None:
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[r, k] = stepped[r, k] + momentum * (stepped[r, k] - previous[r, k])


@_compiled
def _downhill(stepped: Array, filled: Array, out: Array) -> Number:
    total = out.dtype.type(0)
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            difference = stepped[r, k] - filled[r, k]
            out[r, k] = difference
            total += difference * difference
    return total


@_compiled
def _square(x: Array) -> Number:
    total = x.dtype.type(0)
    for r in range(x.shape[0]):
        for k in range(x.shape[1]):
            total += x[r, k] * x[r, k]
    return total


@_compiled
def _hessian(direction: Array, unseen: Array, added: float, image: Array, more: Array) -> Number:
    """image = added·direction − unseen∘(image + more), and its product with the direction."""
    total = image.dtype.type(0)
    for r in range(image.shape[0]):
        for k in range(image.shape[1]):
            value = added * direction[r, k] - unseen[r, k] * (image[r, k] + more[r, k])
            image[r, k] = value
            total += direction[r, k] * value
    return total


@_compiled
def _advance(solution: Array, residual: Array, direction: Array, image: Array, along: float) -> Number:
    """One step of conjugate gradients, and the square of what is left."""
    total = residual.dtype.type(0)
    for r in range(residual.shape[0]):
        for k in range(residual.shape[1]):
            solution[r, k] += along * direction[r, k]
            value = residual[r, k] - along * image[r, k]
            residual[r, k] = value
            total += value * value
    return total


@_compiled
def _turn(direction: Array, residual: Array, share: float) -> None:
    for r in range(direction.shape[0]):
        for k in range(direction.shape[1]):
            direction[r, k] = residual[r, k] + share * direction[r, k]
