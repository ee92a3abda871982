"""Eigenvectors of small symmetric matrices, one after another; `linalg.eigh` says why."""

import math
from typing import Any

import numpy as np

from menet.kernels.compiling import REGISTER, Array, Number, compiled, inlined, padded

_ATTEMPTS = 40


@compiled
def eigh_of_each(matrices: Array, values: Array, rows: Array, eps: float, tiny: float) -> bool:
    """Ascending eigenvalues and eigenvectors (as rows) of each symmetric matrix; False if one did not converge.

    Without columns in `rows`, only the eigenvalues.
    """
    size, wanted = matrices.shape[1], rows.shape[2]
    kind = matrices.dtype
    width = padded(size)
    basis, scratch = np.zeros((width, width if wanted else 0), kind), scratch_for(size, kind)
    work = scratch[0]
    for number in range(len(matrices)):
        for i in range(size):
            for k in range(size):
                work[i, k] = matrices[number, i, k]
        if not eigh(scratch, values[number], basis, eps, tiny):
            return False
        for i in range(size):
            for k in range(wanted):
                rows[number, i, k] = basis[i, k]
    return True


@inlined
def scratch_for(size: int, kind: Any) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Workspace for `eigh`; its first array holds the matrix to decompose."""
    width = padded(size)
    matrix, spare = np.zeros((width, width), kind), np.zeros((width, width), kind)
    return matrix, spare, np.empty(size, kind), np.empty(size, kind), np.empty(width, kind), np.empty(width, kind)


@inlined
def eigh(
    scratch: tuple[Array, Array, Array, Array, Array, Array], values: Array, basis: Array, eps: float, tiny: float
) -> bool:
    """Decompose the matrix in `scratch`, which is overwritten: ascending values, vectors as rows of `basis`."""
    matrix, spare, off_diagonal, weight, v, w = scratch
    size = len(values)
    kind = matrix.dtype
    # Entries are scaled to at most 1, so that squares neither overflow nor underflow.
    scale = kind.type(0)
    for i in range(size):
        for k in range(size):
            scale = max(scale, abs(matrix[i, k]))
    scale = max(scale, kind.type(tiny))
    for i in range(size):
        for k in range(size):
            matrix[i, k] /= scale
    _tridiagonal(matrix, values, off_diagonal, weight, v, w, kind.type(tiny))
    if basis.shape[1]:
        _accumulate(matrix, weight, basis)
    converged = _diagonal(values, off_diagonal, basis, kind.type(eps))
    if basis.shape[1]:
        _orthonormalize(basis, matrix, spare)
    _sort(values, basis)
    for i in range(size):
        values[i] *= scale
    return converged


@inlined
def _tridiagonal(
    a: Array, diagonal: Array, off_diagonal: Array, weight: Array, v: Array, w: Array, tiny: float
) -> None:
    """Householder reduction, from the last row up. Row i keeps the vector v of its reflection I − weight·vvᵀ."""
    size, width = len(diagonal), a.shape[1]
    zero, half, one = a.dtype.type(0), a.dtype.type(0.5), a.dtype.type(1)
    for i in range(size - 1, 0, -1):
        end = min((i + REGISTER - 1) // REGISTER * REGISTER, width)
        diagonal[i] = a[i, i]
        for k in range(i, end):
            a[i, k] = zero
        square = zero
        for k in range(end):
            square += a[i, k] * a[i, k]
        last = a[i, i - 1]
        if square - last * last <= tiny:
            off_diagonal[i - 1] = last
            weight[i] = zero
            continue
        reflected = math.copysign(math.sqrt(square), -last)
        off_diagonal[i - 1] = reflected
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
    off_diagonal[size - 1] = zero


@inlined
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
        end = min((i + REGISTER - 1) // REGISTER * REGISTER, width)
        for r in range(i):
            along = a.dtype.type(0)
            for k in range(end):
                along += basis[r, k] * a[i, k]
            along *= scale
            for k in range(end):
                basis[r, k] -= along * a[i, k]


@inlined
def _diagonal(d: Array, e: Array, basis: Array, eps: float) -> bool:
    """The implicit QL iteration on a tridiagonal matrix, its rotations applied to the rows of `basis`."""
    size, width = len(d), basis.shape[1]
    zero, one, two = d.dtype.type(0), d.dtype.type(1), d.dtype.type(2)
    large, faint = d.dtype.type(1e15), d.dtype.type(1e-30)
    # Relative to entries of at most 1 this is rounding: a block of rank zero counts as converged.
    noise = eps * eps
    for low in range(size):
        settled = False
        for _ in range(_ATTEMPTS):
            high = low
            while high < size - 1 and abs(e[high]) > eps * (abs(d[high]) + abs(d[high + 1])) + noise:
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
                square = f * f + g * g
                r: Number = math.sqrt(square)
                if square <= faint:
                    # Squares would underflow.
                    r = math.sqrt((f * large) * (f * large) + (g * large) * (g * large)) / large
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


@inlined
def _orthonormalize(basis: Array, product: Array, spare: Array) -> None:
    """One Newton–Schulz step: removes the rounding errors that a thousand rotations have accumulated."""
    np.dot(basis, basis.T, product)
    np.dot(product, basis, spare)
    more, less = basis.dtype.type(1.5), basis.dtype.type(0.5)
    for i in range(basis.shape[0]):
        for k in range(basis.shape[1]):
            basis[i, k] = more * basis[i, k] - less * spare[i, k]


@inlined
def _sort(values: Array, rows: Array) -> None:
    """Sort the values, and the rows with them; they are almost sorted already."""
    for last in range(1, len(values)):
        i = last
        while i > 0 and values[i - 1] > values[i]:
            values[i - 1], values[i] = values[i], values[i - 1]
            for k in range(rows.shape[1]):
                rows[i - 1, k], rows[i, k] = rows[i, k], rows[i - 1, k]
            i -= 1
