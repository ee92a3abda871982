"""`usvt` of each matrix, and its adjoint.

In single precision the eigenvectors of the Gram matrix do not separate the singular values at the cutoff, which
are small and close together. Double precision would take twice as long for all of them; only the angles between
those kept and those dropped matter, and one step of first-order perturbation in double precision corrects them.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import Array, compiled, inlined, padded, scale_of
from menet.kernels.eigenvectors import (
    eigh,
    eigh_together,
    lanes_for,
    put,
    scratch_for,
    take,
    together_for,
    worthwhile,
)

_LARGEST_ANGLE = 0.01
"""Beyond it the correction's own error, of second order, would show; the matrix is then decomposed in double."""


@compiled
def truncate_each(
    x: Array,
    threshold: Array,
    count: int,
    fraction: Array,
    out: Array,
    reached: tuple[Array, Array, NDArray[np.int64]],
    eps: float,
    tiny: float,
) -> int:
    """Keep the `count` largest singular values, or those of at least `threshold` if `count` is 0.

    The result is divided by `fraction`. Where `reached` is not empty, it receives the singular values divided by
    `scale_of` the matrix, the singular vectors of its shorter side as rows (of a square one the right ones, as
    `linalg.tall` has it), and how many are dropped. `out` may be `x`. Returns how many matrices are done: less
    than all if an eigenvalue iteration did not converge.
    """
    turned = x.shape[1] >= x.shape[2]
    size, long = min(x.shape[1], x.shape[2]), max(x.shape[1], x.shape[2])
    width = padded(size)
    kind = x.dtype
    single = eps > 1e-10 and count > 0
    basis, values, scratch = np.zeros((width, width), kind), np.empty(size, kind), scratch_for(size, kind)
    lanes = lanes_for(len(x), size, x.itemsize) if single else 1
    narrow, scales = np.zeros((lanes, width, long), kind), np.ones(lanes, kind)
    together, result, part = (
        together_for(lanes, size, kind),
        np.zeros((width, long), kind),
        np.empty(width * long, kind),
    )
    wide, exact, squares = np.zeros((width, long)), np.zeros((width, width)), np.empty(size)
    wide_scratch = scratch_for(size, wide.dtype)
    small = np.zeros((width, width), kind), np.zeros((width, width), kind), np.zeros((width, width), kind)
    work = np.empty((width, long)), np.zeros((width, width)), exact, *small
    keep_values, keep_basis, keep_dropped = reached
    for first in range(0, len(x), lanes):
        these = min(lanes, len(x) - first)
        shared = single and worthwhile(these, lanes)
        for lane in range(these):
            scales[lane] = scale_of(x[first + lane], kind.type(tiny))
            inverse = kind.type(1) / scales[lane]
            for i in range(size):
                for k in range(long):
                    entry = x[first + lane, k, i] if turned else x[first + lane, i, k]
                    narrow[lane, i, k] = entry * inverse
        if shared:
            for lane in range(lanes):
                if lane < these:
                    np.dot(narrow[lane], narrow[lane].T, scratch[0])
                put(together, scratch[0] if lane < these else scratch[0][:0], lane, size, True, tiny)
            if not eigh_together(together, size, True, eps):
                return first
        for lane in range(these):
            number, scale = first + lane, scales[lane]
            for i in range(size):
                for k in range(long):
                    wide[i, k] = narrow[lane, i, k]
            dropped = max(size - count, 0)
            separated = False
            if single:
                if shared:
                    take(together, lane, values, basis)
                else:
                    np.dot(narrow[lane], narrow[lane].T, scratch[0])
                    if not eigh(scratch, values, basis, eps, tiny):
                        return number
                for i in range(size):
                    squares[i] = max(values[i], kind.type(0))
                separated = dropped == 0 or _separate(wide, squares, basis, dropped, len(keep_values) > 0, work)
            if not separated:
                np.dot(wide, wide.T, wide_scratch[0])
                if not eigh(wide_scratch, squares, exact, 2.220446049250313e-16, 2.2250738585072014e-308):
                    return number
                if count == 0:
                    cutoff = threshold[number] / scale
                    dropped = 0
                    while dropped < size and math.sqrt(max(squares[dropped], 0.0)) < cutoff:
                        dropped += 1
                for i in range(size):
                    for k in range(width):
                        basis[i, k] = exact[i, k]
            factor = scale * (kind.type(1) / fraction[number])
            # Project on the fewer vectors.
            few = dropped <= size - dropped
            chosen = basis[:dropped] if few else basis[dropped:size]
            if len(chosen):
                coordinates = part[: len(chosen) * long].reshape(len(chosen), long)
                np.dot(chosen, narrow[lane], coordinates)
                np.dot(chosen.T, coordinates, result)
            else:
                result[:] = 0
            for i in range(size):
                for k in range(long):
                    value = (narrow[lane, i, k] - result[i, k] if few else result[i, k]) * factor
                    if turned:
                        out[number, k, i] = value
                    else:
                        out[number, i, k] = value
            if len(keep_values):
                keep_dropped[number] = dropped
                for i in range(size):
                    keep_values[number, i] = math.sqrt(max(squares[i], 0.0))
                    for k in range(size):
                        keep_basis[number, i, k] = basis[i, k]
    return len(x)


@inlined
def _separate(x: Array, squares: Array, basis: Array, dropped: int, others: bool, work: Any) -> bool:
    """Turn the first `dropped` eigenvectors of xxᵀ away from the others; False if they are too close for that.

    With r = xxᵀv − λv for a dropped vector v and its Rayleigh quotient λ, the angle to a kept vector w with value
    μ is r·w / (λ − μ) to first order. Only r needs double precision, because it is a small difference. With
    `others` the kept vectors turn as well, and the values of the nearest ones become Rayleigh quotients.
    """
    images, residuals, exact, small, angles, turned = work
    size, width, long = len(squares), basis.shape[1], x.shape[1]
    near = min(size, dropped + 4) if others else dropped
    image = images[:near]
    for i in range(near):
        for k in range(width):
            exact[i, k] = basis[i, k]
    np.dot(exact[:near], x, image)
    for i in range(near):
        total = 0.0
        for k in range(long):
            total += image[i, k] * image[i, k]
        squares[i] = total
    np.dot(image, x.T, residuals[:near])
    for j in range(dropped):
        for k in range(width):
            small[j, k] = residuals[j, k] - squares[j] * exact[j, k]
    np.dot(small[:dropped], basis.T, angles[:dropped])
    for j in range(dropped):
        for i in range(size):
            apart = squares[i] - squares[j]
            tilt = angles[j, i]
            if i < dropped:
                angles[j, i] = 0
            elif abs(tilt) > _LARGEST_ANGLE * apart:
                return False
            else:
                angles[j, i] = -tilt / apart if apart > 0 else 0
    np.dot(angles[:dropped], basis, turned[:dropped])
    if others:
        np.dot(angles[:dropped].T, basis[:dropped], small)
        for i in range(dropped, size):
            for k in range(width):
                basis[i, k] -= small[i, k]
    for j in range(dropped):
        for k in range(width):
            basis[j, k] += turned[j, k]
    return True


@compiled
def truncate_adjoint_each(
    x: Array,
    fraction: Array,
    reached: tuple[Array, Array, NDArray[np.int64]],
    outgoing: Array,
    gradient: Array,
    eps: float,
    tiny: float,
) -> None:
    """As `linalg.truncate_derivative`, by the derivative of the part that is dropped if that is smaller.

    With the chosen vectors as the rows of U and the others as those of R, the derivative along D is
    Uᵀ(UD + MX) + MᵀUX, where M = NR and N is (UX·Dᵀ + UD·Xᵀ)Rᵀ over differences of squared singular values.
    """
    keep_values, keep_basis, keep_dropped = reached
    turned = x.shape[1] >= x.shape[2]
    size, long = min(x.shape[1], x.shape[2]), max(x.shape[1], x.shape[2])
    kind = x.dtype
    one, least = kind.type(1), kind.type(math.sqrt(tiny))
    narrow, direction = np.zeros((size, long), kind), np.zeros((size, long), kind)
    result, parts = np.zeros((size, long), kind), np.zeros((3, size * long), kind)
    small = np.zeros((5, size * size), kind)
    for number in range(len(x)):
        inverse, factor = one / scale_of(x[number], kind.type(tiny)), one / fraction[number]
        if turned:
            for k in range(long):
                for i in range(size):
                    narrow[i, k], direction[i, k] = x[number, k, i], outgoing[number, k, i]
        matrix = narrow if turned else x[number]
        along = direction if turned else outgoing[number]
        values, basis, dropped = keep_values[number], keep_basis[number], keep_dropped[number]
        few = dropped <= size - dropped
        chosen = dropped if few else size - dropped
        rest = size - chosen
        if chosen == 0:
            result[:] = 0
        else:
            start, other = (0, chosen) if few else (rest, 0)
            vectors, others = basis[start : start + chosen], basis[other : other + rest]
            by_direction = small[0, : chosen * size].reshape(chosen, size)
            by_matrix = small[1, : chosen * size].reshape(chosen, size)
            angles = small[2, : chosen * rest].reshape(chosen, rest)
            stacked = small[3, : 2 * chosen * size].reshape(2 * chosen, size)
            moved = small[4, : chosen * size].reshape(chosen, size)
            both = parts[0, : 2 * chosen * long].reshape(2 * chosen, long)
            onto = parts[1, : chosen * long].reshape(chosen, long)
            added = parts[2, : chosen * long].reshape(chosen, long)
            np.dot(vectors, matrix, both[chosen:])
            np.dot(vectors, along, onto)
            for i in range(chosen):
                for k in range(long):
                    both[chosen + i, k] *= inverse
            np.dot(both[chosen:], along.T, by_direction)
            np.dot(onto, matrix.T, by_matrix)
            for i in range(chosen):
                for k in range(size):
                    by_direction[i, k] += by_matrix[i, k] * inverse
            np.dot(by_direction, others.T, angles)
            negligible = max(kind.type(math.sqrt(eps)) * values[size - 1], least)
            for i in range(chosen):
                value = values[start + i]
                for k in range(rest):
                    apart = value - values[other + k]
                    far = max(abs(apart), negligible)
                    near = -far if apart < 0 or (apart == 0 and few) else far
                    angles[i, k] /= near * max(value + values[other + k], least)
            np.dot(angles, others, stacked[chosen:])
            for i in range(chosen):
                for k in range(size):
                    stacked[i, k] = vectors[i, k]
                    moved[i, k] = stacked[chosen + i, k] * inverse
            np.dot(moved, matrix, added)
            for i in range(chosen):
                for k in range(long):
                    both[i, k] = onto[i, k] + added[i, k]
            np.dot(stacked.T, both, result)
        for i in range(size):
            for k in range(long):
                value = (along[i, k] - result[i, k] if few else result[i, k]) * factor
                if turned:
                    gradient[number, k, i] = value
                else:
                    gradient[number, i, k] = value
