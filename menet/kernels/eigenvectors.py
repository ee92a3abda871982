"""Eigenvectors of small symmetric matrices, one after another or several together; `linalg.eigh` says why.

`eigh` takes one matrix. `eigh_together` takes one in each lane of a register (see `lanes`), in little more time:
its iteration goes on until every lane has converged, with rotations by nothing in those that have.
"""

import math
from typing import Any

import numpy as np

from menet.kernels.compiling import REGISTER, Array, Number, compiled, inlined, padded
from menet.kernels.lanes import (
    BYTES,
    anywhere,
    choose,
    everywhere,
    load,
    magnitude,
    square_root,
    store,
)

_ATTEMPTS = 40
_FEW = 5
"""So many matrices take as long one after another as a register full of them together."""
_LARGEST_TOGETHER = 64
"""Beyond this size the matrices of all lanes fall out of the cache."""


@compiled
def eigh_of_each(matrices: Array, values: Array, rows: Array, eps: float, tiny: float) -> bool:
    """Ascending eigenvalues and eigenvectors (as rows) of each symmetric matrix; False if one did not converge.

    Without columns in `rows`, only the eigenvalues.
    """
    size, wanted = matrices.shape[1], rows.shape[2]
    kind = matrices.dtype
    width = padded(size)
    basis, scratch = np.zeros((width, width if wanted else 0), kind), scratch_for(size, kind)
    lanes = lanes_for(len(matrices), size, matrices.itemsize)
    together, work = together_for(lanes, size, kind), scratch[0]
    for first in range(0, len(matrices), lanes):
        count = min(lanes, len(matrices) - first)
        shared = worthwhile(count, lanes)
        if shared:
            for lane in range(lanes):
                put(together, matrices[first + lane] if lane < count else work[:0], lane, size, False, tiny)
            if not eigh_together(together, size, wanted > 0, eps):
                return False
        for number in range(first, first + count):
            if shared:
                take(together, number - first, values[number], basis)
                if wanted:
                    orthonormalize(basis, scratch[0], scratch[1])
            else:
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
        orthonormalize(basis, matrix, spare)
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
def orthonormalize(basis: Array, product: Array, spare: Array) -> None:
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


@inlined
def lanes_for(count: int, size: int, itemsize: int) -> int:
    """In how many lanes `count` matrices are decomposed: 1 is one after another."""
    return BYTES // itemsize if count > _FEW and size <= _LARGEST_TOGETHER else 1


@inlined
def worthwhile(count: int, lanes: int) -> bool:
    """Whether to decompose `count` matrices in `lanes` lanes together."""
    return lanes > 1 and count > _FEW


@inlined
def together_for(lanes: int, size: int, kind: Any) -> tuple[Array, Array, Array, Array]:
    """Workspace for `eigh_together`: the matrices, their eigenvectors, five rows of numbers, and their scales."""
    size = size if lanes > 1 else 0
    whole, line = size * size * lanes, size * lanes
    return np.zeros(whole, kind), np.zeros(whole, kind), np.zeros(5 * line, kind), np.ones(lanes, kind)


@inlined
def put(
    together: tuple[Array, Array, Array, Array], matrix: Array, lane: int, size: int, gram: bool, tiny: float
) -> None:
    """Put a symmetric matrix into a lane, or zero if `matrix` has no rows; of a Gram matrix, say so."""
    matrices, _, _, scales = together
    lanes, kind = len(scales), matrices.dtype
    scale = kind.type(tiny)
    for i in range(min(size, len(matrix))):
        # The largest entries of a Gram matrix are on its diagonal.
        for k in range(i if gram else 0, i + 1):
            scale = max(scale, abs(matrix[i, k]))
    scales[lane] = scale
    inverse = kind.type(1) / scale
    for i in range(size):
        for k in range(i + 1):
            matrices[(i * size + k) * lanes + lane] = matrix[i, k] * inverse if len(matrix) else kind.type(0)


@inlined
def take(together: tuple[Array, Array, Array, Array], lane: int, values: Array, basis: Array) -> None:
    """The eigenvalues of the matrix in a lane, ascending, and its eigenvectors as rows; `orthonormalize` them."""
    _, vectors, lines, scales = together
    size, lanes = len(values), len(scales)
    for i in range(size):
        values[i] = lines[i * lanes + lane] * scales[lane]
    if basis.shape[1]:
        for k in range(size):
            for i in range(size):
                basis[i, k] = vectors[(k * size + i) * lanes + lane]
    _sort(values, basis)


@inlined
def eigh_together(together: tuple[Array, Array, Array, Array], size: int, wanted: bool, eps: float) -> bool:
    """Decompose the matrix in each lane, with eigenvectors if `wanted`; False if one did not converge."""
    matrices, vectors, lines, scales = together
    line = size * len(scales)
    diagonal, off_diagonal, weight = lines[:line], lines[line : 2 * line], lines[2 * line : 3 * line]
    first, second = lines[3 * line : 4 * line], lines[4 * line : 5 * line]
    _tridiagonal_together(matrices, size, diagonal, off_diagonal, weight, first, second)
    if wanted:
        _accumulate_together(matrices, size, weight, vectors)
    return _diagonal_together(diagonal, off_diagonal, size, vectors, first, second, wanted, eps)


@inlined
def _tridiagonal_together(
    a: Array, size: int, diagonal: Array, off_diagonal: Array, weight: Array, v: Array, w: Array
) -> None:
    """`_tridiagonal` in each lane, by the lower triangle alone."""
    kind = a.dtype
    zero, half, one = everywhere(a, kind.type(0)), everywhere(a, kind.type(0.5)), everywhere(a, kind.type(1))
    least = everywhere(a, kind.type(1e-37))
    for i in range(size - 1, 0, -1):
        row = i * size
        store(diagonal, i, load(a, row + i))
        square = zero
        for k in range(i):
            entry = load(a, row + k)
            store(v, k, entry)
            store(w, k, zero)
            square = square + entry * entry
        last = load(a, row + i - 1)
        reduced = square - last * last <= least
        length = square_root(square)
        reflected = choose(last > zero, zero - length, length)
        store(off_diagonal, i - 1, choose(reduced, last, reflected))
        scale = choose(reduced, zero, one / choose(reduced, one, square - last * reflected))
        store(weight, i, scale)
        entry = last - reflected
        store(a, row + i - 1, entry)
        store(v, i - 1, entry)
        for r in range(i):
            here = load(v, r)
            total = load(a, r * size + r) * here
            for k in range(r):
                entry = load(a, r * size + k)
                store(w, k, load(w, k) + entry * here)
                total = total + entry * load(v, k)
            store(w, r, load(w, r) + total)
        along = zero
        for k in range(i):
            entry = load(w, k) * scale
            store(w, k, entry)
            along = along + entry * load(v, k)
        along = along * scale * half
        for k in range(i):
            store(w, k, load(w, k) - along * load(v, k))
        for r in range(i):
            here, turned = load(v, r), load(w, r)
            for k in range(r + 1):
                entry = load(a, r * size + k)
                store(a, r * size + k, entry - here * load(w, k) - turned * load(v, k))
    store(diagonal, 0, load(a, 0))
    store(off_diagonal, size - 1, zero)


@inlined
def _accumulate_together(a: Array, size: int, weight: Array, vectors: Array) -> None:
    """`_accumulate` in each lane, transposed: `vectors` has a row for each component."""
    kind = a.dtype
    zero, one = everywhere(a, kind.type(0)), everywhere(a, kind.type(1))
    for r in range(size):
        for k in range(size):
            store(vectors, r * size + k, one if r == k else zero)
    for i in range(1, size):
        scale = load(weight, i)
        for r in range(i):
            along = zero
            for k in range(i):
                along = along + load(vectors, r * size + k) * load(a, i * size + k)
            along = along * scale
            for k in range(i):
                entry = load(vectors, r * size + k)
                store(vectors, r * size + k, entry - along * load(a, i * size + k))
    for r in range(size):
        for k in range(r):
            entry = load(vectors, r * size + k)
            store(vectors, r * size + k, load(vectors, k * size + r))
            store(vectors, k * size + r, entry)


@inlined
def _diagonal_together(
    d: Array, e: Array, size: int, vectors: Array, cosines: Array, sines: Array, wanted: bool, eps: float
) -> bool:
    """`_diagonal` in each lane. Its `high` differs between lanes: above it a lane rotates by nothing."""
    kind = d.dtype
    zero, one, two = everywhere(d, kind.type(0)), everywhere(d, kind.type(1)), everywhere(d, kind.type(2))
    large, faint = everywhere(d, kind.type(1e15)), everywhere(d, kind.type(1e-30))
    rounding, noise = everywhere(d, kind.type(eps)), everywhere(d, kind.type(eps) * kind.type(eps))
    for low in range(size):
        settled = False
        for _ in range(_ATTEMPTS):
            # Positions are kept as numbers of the same kind, to compare them in the lanes.
            high, corner, right = everywhere(d, kind.type(size - 1)), load(d, size - 1), load(d, size - 1)
            for i in range(size - 2, low - 1, -1):
                here = load(d, i)
                small = magnitude(load(e, i)) <= rounding * (magnitude(here) + magnitude(right)) + noise
                high = choose(small, everywhere(d, kind.type(i)), high)
                corner = choose(small, here, corner)
                right = here
            turning = high > everywhere(d, kind.type(low))
            if not anywhere(turning):
                settled = True
                break
            top = size - 1
            while not anywhere(high > everywhere(d, kind.type(top - 1))):
                top -= 1
            # Wilkinson's shift.
            beside = choose(turning, load(e, low), one)
            g = (load(d, low + 1) - load(d, low)) / (two * beside)
            length = square_root(g * g + one)
            shift = corner - load(d, low) + beside / (g + choose(g < zero, zero - length, length))
            g, s, c, p, below = zero, zero, one, zero, load(d, top)
            for i in range(top - 1, low - 1, -1):
                place = everywhere(d, kind.type(i))
                inside, begins = high > place, high == place + one
                g, p = choose(begins, shift, g), choose(begins, zero, p)
                s, c = choose(begins, one, s), choose(begins, one, c)
                f, b = s * load(e, i), c * load(e, i)
                square = f * f + g * g
                r, vanishing = square_root(square), square <= faint
                if anywhere(vanishing):
                    # Squares would underflow.
                    more, longer = f * large, g * large
                    r = choose(vanishing, square_root(more * more + longer * longer) / large, r)
                store(e, i + 1, choose(begins, zero, choose(inside, r, load(e, i + 1))))
                turns = r > zero
                divisor = choose(turns, r, one)
                s = choose(inside, choose(turns, f / divisor, zero), zero)
                c = choose(inside, choose(turns, g / divisor, one), one)
                g = below - p
                here = load(d, i)
                r = (here - g) * s + two * c * b
                p = choose(inside, s * r, zero)
                store(d, i + 1, choose(inside, g + p, below))
                g = c * r - b
                below = here
                store(cosines, i, c)
                store(sines, i, s)
            store(d, low, below - p)
            store(e, low, choose(turning, g, load(e, low)))
            if wanted:
                _rotate_together(vectors, size, low, top, cosines, sines)
        if not settled:
            return False
    return True


@inlined
def _rotate_together(vectors: Array, size: int, low: int, top: int, cosines: Array, sines: Array) -> None:
    """Apply the rotations of one step to each row, four rows at a time: each waits for its last rotation."""
    whole = size // 4 * 4
    for k in range(0, whole, 4):
        one, two, three, four = k * size, (k + 1) * size, (k + 2) * size, (k + 3) * size
        a, b = load(vectors, one + top), load(vectors, two + top)
        c, d = load(vectors, three + top), load(vectors, four + top)
        for i in range(top - 1, low - 1, -1):
            cosine, sine = load(cosines, i), load(sines, i)
            above = load(vectors, one + i)
            store(vectors, one + i + 1, sine * above + cosine * a)
            a = cosine * above - sine * a
            above = load(vectors, two + i)
            store(vectors, two + i + 1, sine * above + cosine * b)
            b = cosine * above - sine * b
            above = load(vectors, three + i)
            store(vectors, three + i + 1, sine * above + cosine * c)
            c = cosine * above - sine * c
            above = load(vectors, four + i)
            store(vectors, four + i + 1, sine * above + cosine * d)
            d = cosine * above - sine * d
        store(vectors, one + low, a)
        store(vectors, two + low, b)
        store(vectors, three + low, c)
        store(vectors, four + low, d)
    for k in range(whole, size):
        carried = load(vectors, k * size + top)
        for i in range(top - 1, low - 1, -1):
            above, cosine, sine = load(vectors, k * size + i), load(cosines, i), load(sines, i)
            store(vectors, k * size + i + 1, sine * above + cosine * carried)
            carried = cosine * above - sine * carried
        store(vectors, k * size + low, carried)
