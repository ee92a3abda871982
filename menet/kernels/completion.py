"""The solver of `estimators/solver.py` for one matrix after another; see there for the method."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import Array, Number, compiled, inlined, local_average, padded
from menet.kernels.eigenvectors import eigh, scratch_for


@compiled
def complete_each(
    x: Array,
    mask: NDArray[np.bool_],
    thresholds: Array,
    estimate: Array,
    iterations: NDArray[np.int64],
    reached: tuple[Array, Array, Array, Array],
    settings: tuple[float, int, int, int, int, int, float, float, float, float],
    eps: float,
    tiny: float,
) -> bool:
    """Solve each problem, starting from local averages.

    `settings` holds tol, max_iter, the number of rounds, of gradient steps, of Newton steps and of conjugate
    gradient iterations in each, the initial damping, the initial momentum, and the smallest ratio of threshold
    to norm that is solved here, and that is told from zero. Where `reached` is not empty, it receives the filled
    matrix at which the iteration ended, its singular values, its right singular vectors as rows, and the
    threshold, in units of `scale_of` the matrix. `iterations` is 0 where these rounds did not suffice, negative
    where `max_iter` was reached. Returns False if an eigenvalue iteration did not converge.
    """
    tol, max_iter, rounds, first_steps, newton_steps, inner_iterations, first_damping = settings[:7]
    first_momentum, solvable, smallest = settings[7:]
    rows, size = x.shape[1], x.shape[2]
    width = padded(size)
    kind = x.dtype
    zero, one = kind.type(0), kind.type(1)
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
    scratch = scratch_for(size, kind)
    keep_filled, keep_values, keep_basis, keep_threshold = reached
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
        threshold = thresholds[number] / scale
        if threshold > 0:
            if threshold < kind.type(solvable) * norm:
                iterations[number] = 0
                continue
            threshold = max(threshold, kind.type(smallest) * norm)
        goal_size = tol * threshold
        local_average(a, unseen, size, point)
        _fill(a, unseen, point, filled)
        damping = first_damping
        used, steps, taken = 0, first_steps, 0
        for _ in range(rounds):
            steps = min(steps, max_iter - used - 1)
            momentum: Number = first_momentum
            point[:] = filled
            for _ in range(steps):
                if not _decompose(point, values, basis, scratch, eps, tiny):
                    return False
                _shrinkage(values, basis, threshold, ratio, mixed, core, tiny)
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
                _shrinkage(values, basis, threshold, ratio, mixed, core, tiny)
                np.dot(filled, core, shrunk)
                _fill(a, unseen, shrunk, stepped)
                square = _negative_gradient(stepped, filled, residual)
                length = max(math.sqrt(_square(shrunk)), 1e-30)
                gradient = math.sqrt(square)
                finished = gradient <= 4 * eps * length
                if step > 1 and not (gradient < last_size or finished):
                    break
                shrunk, before_shrunk = before_shrunk, shrunk
                stepped, before_stepped = before_stepped, stepped
                if finished or gradient <= goal_size:
                    taken = step
                    break
                if step == limit:
                    break
                _derivative(
                    filled, values, basis, threshold, ratio, turned, same, crossed, left, mixed, eps, tiny
                )
                added = kind.type(1 + damping * gradient / length)
                # Conjugate gradients; the residual starts as the negative gradient, the solution as zero.
                direction[:] = residual
                goal = square * kind.type(0.01)
                for _ in range(inner_iterations):
                    if not square > goal:
                        break
                    _apply(
                        direction, core, left, turned, basis, same, crossed, inside, mixed, image, turned_image
                    )
                    curvature = _hessian(direction, unseen, added, image, turned_image)
                    if not curvature > 0:
                        break
                    along = square / curvature
                    smaller = _advance(filled, residual, direction, image, along)
                    _new_direction(direction, residual, smaller / square)
                    square = smaller
                last_size = gradient
            if taken:
                break
            filled, before_stepped = before_stepped, filled
            used += limit
            if used >= max_iter:
                break
            # Far from the minimum in a flat valley: more gradient steps, more damping.
            steps, damping = 2 * steps, 8 * damping
        iterations[number] = used + taken if taken else -max_iter if used >= max_iter else 0
        for r in range(rows):
            for k in range(size):
                estimate[number, r, k] = before_shrunk[r, k] * scale
        if len(keep_filled):
            if not taken:
                _fill(a, unseen, before_shrunk, filled)
                if not _decompose(filled, values, basis, scratch, eps, tiny):
                    return False
            keep_threshold[number] = threshold
            for k in range(size):
                keep_values[number, k] = values[k]
                for i in range(size):
                    keep_basis[number, k, i] = basis[k, i]
            for r in range(rows):
                for k in range(size):
                    keep_filled[number, r, k] = filled[r, k]
    return True


@inlined
def scale_of(x: Array, tiny: Number) -> Number:
    """A power of two close to the largest entry: division by it is exact, and squares do not overflow."""
    largest = x.dtype.type(0)
    for r in range(x.shape[0]):
        for k in range(x.shape[1]):
            largest = max(largest, abs(x[r, k]))
    if largest <= tiny:
        return x.dtype.type(1) if largest == 0 else tiny
    return x.dtype.type(math.ldexp(1.0, math.frexp(largest)[1] - 1))


@inlined
def _decompose(x: Array, values: Array, basis: Array, scratch: Any, eps: float, tiny: float) -> bool:
    """Singular values and right singular vectors (rows of `basis`) of a tall matrix."""
    np.dot(x.T, x, scratch[0])
    converged = eigh(scratch, values, basis, eps, tiny)
    for k in range(len(values)):
        values[k] = math.sqrt(max(values[k], x.dtype.type(0)))
    return converged


@inlined
def _shrinkage(
    values: Array, basis: Array, threshold: float, ratio: Array, scaled: Array, core: Array, tiny: float
) -> None:
    """The core for which x·core is the shrunk x, and the fraction of each singular value that remains."""
    size, width = len(values), basis.shape[1]
    zero, least = values.dtype.type(0), values.dtype.type(math.sqrt(tiny))
    for k in range(size):
        ratio[k] = max(values[k] - threshold, zero) / max(values[k], least)
        for j in range(width):
            scaled[k, j] = ratio[k] * basis[k, j]
    np.dot(basis.T, scaled, core)


@inlined
def _derivative(
    x: Array,
    values: Array,
    basis: Array,
    threshold: float,
    ratio: Array,
    turned: Array,
    same: Array,
    crossed: Array,
    left: Array,
    scaled: Array,
    eps: float,
    tiny: float,
) -> None:
    """As in `linalg.shrink_derivative`: left singular vectors, and two coefficients for each pair of values."""
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
            high, low = max(values[i], threshold), max(values[k], threshold)
            both = close if values[i] >= threshold and values[k] >= threshold else zero
            slope = (abs(high - low) + both) / (abs(values[i] - values[k]) + close)
            skew = (high - threshold + low - threshold) / max(values[i] + values[k], least)
            same[i, k] = half * (slope + skew) - ratio[k]
            crossed[i, k] = half * (slope - skew)


@inlined
def _fill(a: Array, unseen: Array, estimate: Array, out: Array) -> None:
    for r in range(a.shape[0]):
        for k in range(a.shape[1]):
            out[r, k] = a[r, k] + unseen[r, k] * estimate[r, k]


@inlined
def _inner_difference(point: Array, stepped: Array, previous: Array) -> Number:
    total = point.dtype.type(0)
    for r in range(point.shape[0]):
        for k in range(point.shape[1]):
            total += (point[r, k] - stepped[r, k]) * (stepped[r, k] - previous[r, k])
    return total


@inlined
def _extrapolate(stepped: Array, previous: Array, momentum: float, out: Array) -> None:
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[r, k] = stepped[r, k] + momentum * (stepped[r, k] - previous[r, k])


@inlined
def _negative_gradient(stepped: Array, filled: Array, out: Array) -> Number:
    total = out.dtype.type(0)
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            difference = stepped[r, k] - filled[r, k]
            out[r, k] = difference
            total += difference * difference
    return total


@inlined
def _square(x: Array) -> Number:
    total = x.dtype.type(0)
    for r in range(x.shape[0]):
        for k in range(x.shape[1]):
            total += x[r, k] * x[r, k]
    return total


@inlined
def _apply(
    direction: Array,
    core: Array,
    left: Array,
    turned: Array,
    basis: Array,
    same: Array,
    crossed: Array,
    inside: Array,
    mixed: Array,
    image: Array,
    more: Array,
) -> None:
    """The derivative of the shrinkage along a direction, as the sum of `image` and `more`."""
    size = len(basis)
    np.dot(left.T, direction, mixed)
    np.dot(mixed, turned, inside)
    for i in range(size):
        for k in range(size):
            mixed[i, k] = same[i, k] * inside[i, k] + crossed[i, k] * inside[k, i]
    np.dot(mixed, basis, inside)
    np.dot(direction, core, image)
    np.dot(left, inside, more)


@inlined
def _hessian(direction: Array, unseen: Array, added: float, image: Array, more: Array) -> Number:
    """image = added·direction − unseen∘(image + more), and its product with the direction."""
    total = image.dtype.type(0)
    for r in range(image.shape[0]):
        for k in range(image.shape[1]):
            value = added * direction[r, k] - unseen[r, k] * (image[r, k] + more[r, k])
            image[r, k] = value
            total += direction[r, k] * value
    return total


@inlined
def _advance(solution: Array, residual: Array, direction: Array, image: Array, along: float) -> Number:
    """One step of conjugate gradients; returns the squared norm of the residual."""
    total = residual.dtype.type(0)
    for r in range(residual.shape[0]):
        for k in range(residual.shape[1]):
            solution[r, k] += along * direction[r, k]
            value = residual[r, k] - along * image[r, k]
            residual[r, k] = value
            total += value * value
    return total


@inlined
def _new_direction(direction: Array, residual: Array, factor: float) -> None:
    for r in range(direction.shape[0]):
        for k in range(direction.shape[1]):
            direction[r, k] = residual[r, k] + factor * direction[r, k]
