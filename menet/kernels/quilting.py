"""Joining patches along minimum-error cuts, one image after another; see `baselines/image_quilting.py`."""

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import compiled, inlined

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@compiled
def quilt_each(patches: Bytes, tops: Integers, lefts: Integers, out: Bytes) -> None:
    """Fill `out` (b, c, h, w) with patches (b, rows, columns, c, side, side) placed at `tops` and `lefts`."""
    channels, side = patches.shape[3], patches.shape[4]
    errors, cost = np.empty((side, side), np.int64), np.empty((side, side), np.int64)
    below, beside = np.empty(side, np.int64), np.empty(side, np.int64)
    for number in range(len(patches)):
        for row in range(len(tops)):
            for column in range(len(lefts)):
                top, left = tops[row], lefts[column]
                patch = patches[number, row, column]
                above = tops[row - 1] + side - top if row > 0 else 0
                before = lefts[column - 1] + side - left if column > 0 else 0
                for i in range(side):
                    below[i], beside[i] = 0, 0
                if before > 0:
                    for i in range(side):
                        for j in range(before):
                            errors[i, j] = _error(out[number], patch, channels, top, left, i, j)
                    _cut(errors, side, before, cost, beside)
                if above > 0:
                    for i in range(above):
                        for j in range(side):
                            errors[j, i] = _error(out[number], patch, channels, top, left, i, j)
                    _cut(errors, side, above, cost, below)
                for i in range(side):
                    for j in range(side):
                        if j >= beside[i] and i >= below[j]:
                            for c in range(channels):
                                out[number, c, top + i, left + j] = patch[c, i, j]


@inlined
def _error(image: Bytes, patch: Bytes, channels: int, top: int, left: int, i: int, j: int) -> np.int64:
    total = np.int64(0)
    for c in range(channels):
        difference = np.int64(image[c, top + i, left + j]) - np.int64(patch[c, i, j])
        total += difference * difference
    return total


@inlined
def _cut(errors: Integers, length: int, overlap: int, cost: Integers, path: Integers) -> None:
    """The path of least total error through `length` lines of `overlap` entries; ties go to the lower index."""
    for j in range(overlap):
        cost[0, j] = errors[0, j]
    for i in range(1, length):
        for j in range(overlap):
            least = cost[i - 1, j]
            for near in range(max(j - 1, 0), min(j + 2, overlap)):
                least = min(least, cost[i - 1, near])
            cost[i, j] = errors[i, j] + least
    low, high = 0, overlap
    for i in range(length - 1, -1, -1):
        best = low
        for j in range(low, high):
            if cost[i, j] < cost[i, best]:
                best = j
        path[i] = best
        low, high = max(best - 1, 0), min(best + 2, overlap)
