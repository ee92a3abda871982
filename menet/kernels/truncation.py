"""Truncates the singular values of one matrix after another; `estimators/usvt.py` says which."""

import math

import numpy as np

from menet.kernels.compiling import Array, compiled, padded
from menet.kernels.eigenvectors import eigh, scratch_for


@compiled
def truncate_each(
    x: Array, threshold: Array, count: int, fraction: Array, out: Array, eps: float, tiny: float
) -> bool:
    """Keep the `count` largest singular values, or those of at least `threshold` if `count` is 0.

    The result is divided by `fraction`. Computed in double precision whatever the dtype of `x`. Returns False
    if an eigenvalue iteration did not converge.
    """
    rows, size = x.shape[1], x.shape[2]
    width = padded(size)
    wide, narrow = np.zeros((rows, width)), np.zeros((rows, width), x.dtype)
    basis, kept, core = np.zeros((width, width)), np.zeros((width, width)), np.zeros((width, width))
    small_core, result = np.zeros((width, width), x.dtype), np.zeros((rows, width), x.dtype)
    values, scratch = np.empty(size), scratch_for(size, wide.dtype)
    for number in range(len(x)):
        for r in range(rows):
            for k in range(size):
                wide[r, k] = x[number, r, k]
                narrow[r, k] = x[number, r, k]
        np.dot(wide.T, wide, scratch[0])
        if not eigh(scratch, values, basis, eps, tiny):
            return False
        for i in range(size):
            stays = i >= size - count if count else math.sqrt(max(values[i], 0.0)) >= threshold[number]
            factor = 1 / fraction[number] if stays else 0.0
            for k in range(width):
                kept[i, k] = factor * basis[i, k]
        np.dot(basis.T, kept, core)
        for i in range(width):
            for k in range(width):
                small_core[i, k] = core[i, k]
        np.dot(narrow, small_core, result)
        for r in range(rows):
            for k in range(size):
                out[number, r, k] = result[r, k]
    return True
