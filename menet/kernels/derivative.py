"""The derivative of a function that shrinks singular values, along a direction; that of truncation is thinner."""

import math
from typing import Any

import numpy as np

from menet.kernels.compiling import Array, inlined, padded


@inlined
def derivative_for(rows: int, size: int, kind: Any) -> tuple[Array, ...]:
    """Workspace for `prepare_derivative` and `apply_derivative`.

    Its first arrays are for the slopes, the right singular vectors as columns, and f(XᵀX) of `apply_derivative`;
    in its last are the diagonal entries of (XV)ᵀDV afterwards.
    """
    width = padded(size)
    small, tall = (width, width), (rows, width)
    slopes, turned, core = np.zeros(small, kind), np.zeros(small, kind), np.zeros(small, kind)
    image, extra, stacked = np.zeros(tall, kind), np.zeros(tall, kind), np.zeros((2 * width, width), kind)
    along, inside, mixed = np.zeros(small, kind), np.zeros(small, kind), np.zeros(small, kind)
    # Where few vectors are kept, the columns of smaller arrays.
    short, long = width * width, rows * width
    some_turned, others, crossed = np.zeros(short, kind), np.zeros(short, kind), np.zeros(short, kind)
    some, rest, projected = np.zeros(long, kind), np.zeros(long, kind), np.zeros(long, kind)
    beside, lower = np.zeros(2 * long, kind), np.zeros(long, kind)
    return (
        *(slopes, turned, core, image, extra, along, inside, mixed, stacked),
        *(some_turned, others, projected, crossed, some, rest, beside, lower, np.zeros(width, kind)),
    )


@inlined
def slopes_of_shrinkage(values: Array, threshold: float, slopes: Array, eps: float, tiny: float) -> int:
    """Divided differences by σ² of 1 − threshold/σ, or 0 where that is negative; returns how many are not."""
    size = len(values)
    kind = values.dtype
    close = kind.type(10 * eps) * values[size - 1] + kind.type(math.sqrt(tiny))
    kept = 0
    for k in range(size):
        kept += values[k] > threshold
    for i in range(size - kept, size):
        high = values[i]
        for k in range(size):
            low = values[k]
            over = threshold / low if low > threshold else (high - threshold) / (high - low + close)
            slopes[i, k] = over / max(high * (high + low), kind.type(tiny))
    return kept


@inlined
def prepare_derivative(x: Array, basis: Array, ratio: Array, kept: int, work: Any) -> None:
    """Rotate x and copy what `apply_derivative` needs, with the slopes in `work` and the kept vectors last."""
    slopes, turned, _, image, _, _, _, _, stacked, some_turned, _, _, _, some, rest, beside = work[:16]
    size, width, rows = len(ratio), basis.shape[1], x.shape[0]
    first = size - kept
    for i in range(width):
        for k in range(size):
            turned[i, k] = basis[k, i]
    np.dot(x, turned, image)
    if 2 * kept > size:
        for i in range(size):
            for k in range(i + 1):
                if i < first:
                    slopes[i, k] = 0
                slopes[k, i] = slopes[i, k]
        return
    columns = some_turned[: width * kept].reshape(width, kept)
    for i in range(width):
        for k in range(kept):
            columns[i, k] = turned[i, first + k]
    left, right = some[: rows * kept].reshape(rows, kept), rest[: rows * first].reshape(rows, first)
    both = beside[: rows * 2 * kept].reshape(rows, 2 * kept)
    for r in range(rows):
        for k in range(kept):
            left[r, k] = both[r, k] = image[r, first + k]
        for k in range(first):
            right[r, k] = image[r, k]
    for i in range(kept):
        for k in range(width):
            stacked[kept + i, k] = basis[first + i, k]


@inlined
def apply_derivative(
    direction: Array, basis: Array, ratio: Array, kept: int, work: Any, out: Array, splits: bool
) -> bool:
    """The derivative along D of X·f(XᵀX), which shrinks the singular values of X.

    It is D·f + XV·N·Vᵀ, where N is (XV)ᵀDV plus its transpose, times the slopes. Where few vectors are kept, N
    and f have few rows and columns, and parts of the products suffice. The second factor of a product is never
    transposed, which takes a BLAS twice the time. If `splits`, a second term may be left in the fifth array of
    `work`, where the caller passes over memory anyway; returns whether it was.
    """
    slopes, turned, core, image, extra, along, inside, mixed, stacked = work[:9]
    some_turned, others, projected, crossed, some, rest, beside, lower, diagonal = work[9:]
    size, width, rows = len(ratio), basis.shape[1], direction.shape[0]
    first = size - kept
    if kept == 0:
        out[:] = 0
        return False
    if 2 * kept > size:
        np.dot(image.T, direction, along)
        np.dot(along, turned, inside)
        for i in range(size):
            diagonal[i] = inside[i, i]
            for k in range(size):
                mixed[i, k] = slopes[i, k] * (inside[i, k] + inside[k, i])
        np.dot(mixed, basis, along)
        np.dot(direction, core, out)
        np.dot(image, along, extra)
        if not splits:
            for r in range(rows):
                for k in range(width):
                    out[r, k] += extra[r, k]
        return splits
    left, right = some[: rows * kept].reshape(rows, kept), rest[: rows * first].reshape(rows, first)
    onto, across = projected[: rows * kept].reshape(rows, kept), crossed[: width * kept].reshape(kept, width)
    np.dot(direction, some_turned[: width * kept].reshape(width, kept), onto)
    np.dot(onto.T, image, across)
    np.dot(left.T, direction, along[:kept])
    np.dot(along[:kept], turned, inside[:kept])
    outer = others[: first * kept].reshape(first, kept)
    for i in range(kept):
        diagonal[first + i] = inside[i, first + i]
        for k in range(size):
            mixed[i, k] = slopes[first + i, k] * (inside[i, k] + across[i, k])
        for k in range(first):
            outer[k, i] = mixed[i, k]
    np.dot(mixed[:kept], basis, stacked[:kept])
    added, both = lower[: rows * kept].reshape(rows, kept), beside[: rows * 2 * kept].reshape(rows, 2 * kept)
    np.dot(right, outer, added)
    for r in range(rows):
        for i in range(kept):
            both[r, kept + i] = added[r, i] + ratio[first + i] * onto[r, i]
    np.dot(both, stacked[: 2 * kept], out)
    return False
