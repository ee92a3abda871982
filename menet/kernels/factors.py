"""Loops over the observed entries of one large sparse matrix, for its completion by two factors.

A matrix is given by rows in the usual compressed form (`starts`, `columns`, `values`); its columns are the rows
of the transposed one. `weights` may be empty, which means one for each entry. The model of entry (i, j) is the
inner product of row i of `left` and row j of `right`; the *free* columns of `left` are solved for, the others
given. Each function works on the rows from `first` to `last`, so that threads can share a matrix.

With many more rows than columns, what belongs to the columns stays in the processor's cache, so that one pass
over the rows (`alternate_rows`, `gram_rows`) does for both what else takes a pass over each of two copies. The
columns of a row then ascend, `left` is [U, a, 1] and `right` [V, 1, b] with effects a and b of rows and columns,
and symmetric matrices are packed: the lower triangle by rows.
"""

import numpy as np

from menet.kernels.compiling import Array, compiled


@compiled
def solve_rows(
    starts: Array,
    columns: Array,
    values: Array,
    weights: Array,
    left: Array,
    right: Array,
    free: Array,
    penalty: Array,
    first: int,
    last: int,
) -> float:
    """Ridge regression of each row on `right`, written to the free columns of `left`; the sum of the minima.

    A row without observed entries, or of weights zero, becomes zero.
    """
    size, width = len(free), right.shape[1]
    fixed = np.ones(width, np.bool_)
    for k in range(size):
        fixed[free[k]] = False
    gram, side, z = np.empty((size, size)), np.empty(size), np.empty(size)
    total = 0.0
    for i in range(first, last):
        square = 0.0
        for a in range(size):
            side[a] = 0.0
            for b in range(size):
                gram[a, b] = 0.0
            gram[a, a] = penalty[a]
        for e in range(starts[i], starts[i + 1]):
            j = columns[e]
            target = float(values[e])
            for k in range(width):
                if fixed[k]:
                    target -= left[i, k] * right[j, k]
            weight = float(weights[e]) if len(weights) else 1.0
            for a in range(size):
                z[a] = right[j, free[a]]
            for a in range(size):
                scaled = weight * z[a]
                side[a] += scaled * target
                for b in range(a + 1):
                    gram[a, b] += scaled * z[b]
            square += weight * target * target
        # Cholesky in place, then two triangular solves.
        for a in range(size):
            for b in range(a + 1):
                rest = gram[a, b]
                for c in range(b):
                    rest -= gram[a, c] * gram[b, c]
                if a == b:
                    # An unpenalized direction that no entry determines: its solution is zero.
                    gram[a, a] = np.sqrt(rest) if rest > 1e-15 * gram[a, a] else np.inf
                else:
                    gram[a, b] = rest / gram[b, b]
        for a in range(size):
            rest = side[a]
            for c in range(a):
                rest -= gram[a, c] * z[c]
            z[a] = rest / gram[a, a]
        for a in range(size):
            square -= z[a] * z[a]
        for b in range(size):
            a = size - 1 - b
            rest = z[a]
            for c in range(a + 1, size):
                rest -= gram[c, a] * z[c]
            z[a] = rest / gram[a, a] if gram[a, a] < np.inf else 0.0
        for a in range(size):
            left[i, free[a]] = z[a]
        total += 0.5 * square
    return total


@compiled
def residual_rows(
    starts: Array,
    columns: Array,
    values: Array,
    weights: Array,
    left: Array,
    right: Array,
    out: Array,
    product: Array,
    first: int,
    last: int,
) -> float:
    """Weighted residuals w·(value − model) of each entry into `out`; half the weighted sum of squares.

    Where `product` is not empty, its rows become those of the residual times `right`.
    """
    width = right.shape[1]
    total = 0.0
    for i in range(first, last):
        if len(product):
            for k in range(width):
                product[i, k] = 0.0
        for e in range(starts[i], starts[i + 1]):
            j = columns[e]
            rest = float(values[e])
            for k in range(width):
                rest -= left[i, k] * right[j, k]
            weight = float(weights[e]) if len(weights) else 1.0
            total += 0.5 * weight * rest * rest
            rest *= weight
            out[e] = rest
            if len(product):
                for k in range(width):
                    product[i, k] += rest * right[j, k]
    return total


@compiled
def curvature_rows(
    starts: Array,
    columns: Array,
    residuals: Array,
    weights: Array,
    left: Array,
    right: Array,
    left_step: Array,
    right_step: Array,
    out: Array,
    first: int,
    last: int,
) -> None:
    """The rows of the Hessian of half the weighted squares, applied to a step of both factors, into `out`."""
    width = right.shape[1]
    for i in range(first, last):
        for k in range(width):
            out[i, k] = 0.0
        for e in range(starts[i], starts[i + 1]):
            j = columns[e]
            moved = 0.0
            for k in range(width):
                moved += left_step[i, k] * right[j, k] + left[i, k] * right_step[j, k]
            moved *= float(weights[e]) if len(weights) else 1.0
            rest = residuals[e]
            for k in range(width):
                out[i, k] += moved * right[j, k] - rest * right_step[j, k]


@compiled
def alternate_rows(
    starts: Array,
    columns: Array,
    values: Array,
    weights: Array,
    left: Array,
    right: Array,
    table: Array,
    penalty: Array,
    rank: int,
    of_columns: bool,
    grams: Array,
    first: int,
    last: int,
) -> float:
    """Ridge regression of each row on `right`, written to `left`, and what that of the columns on `left` needs.

    `penalty` has one entry for each regressor of a row: the columns of V and, where rows have effects, the 1.
    Column j of the matrix has its regressors' packed outer product in `table[j]`. To `grams[j]` are added the
    packed sum of outer products of its regressors, the columns of U and maybe the 1, and their products with its
    values. Returns the sum of the minima, without the penalty on `right`.
    """
    size, packed = len(penalty), table.shape[1]
    of_rows = size > rank
    other = rank + of_columns
    other_packed = other * (other + 1) // 2
    gram, side, outer, y = np.empty(packed), np.empty(size), np.empty(other_packed), np.ones(other)
    total = 0.0
    for i in range(first, last):
        square = 0.0
        for k in range(packed):
            gram[k] = 0.0
        for a in range(size):
            side[a] = 0.0
        effect = 0.0 if of_rows else left[i, rank]
        for e in range(starts[i], starts[i + 1]):
            j = columns[e]
            target = float(values[e]) - right[j, rank + 1] - effect
            weight = float(weights[e]) if len(weights) else 1.0
            for k in range(packed):
                gram[k] += weight * table[j, k]
            square += weight * target * target
            target *= weight
            for a in range(size):
                side[a] += target * right[j, a]
        # Cholesky in place, then two triangular solves.
        for a in range(size):
            row = a * (a + 1) // 2
            gram[row + a] += penalty[a]
            for b in range(a + 1):
                column = b * (b + 1) // 2
                rest = gram[row + b]
                for c in range(b):
                    rest -= gram[row + c] * gram[column + c]
                if a == b:
                    # An unpenalized direction that no entry determines: its solution is zero.
                    gram[row + a] = np.sqrt(rest) if rest > 1e-15 * gram[row + a] else np.inf
                else:
                    gram[row + b] = rest / gram[column + b]
            rest = side[a]
            for c in range(a):
                rest -= gram[row + c] * side[c]
            side[a] = rest / gram[row + a]
            square -= side[a] * side[a]
        for b in range(size):
            a = size - 1 - b
            row = a * (a + 1) // 2
            side[a] = side[a] / gram[row + a] if gram[row + a] < np.inf else 0.0
            for c in range(a):
                side[c] -= gram[row + c] * side[a]
            left[i, a] = side[a]
        total += 0.5 * square
        for a in range(rank):
            y[a] = side[a]
        place = 0
        for a in range(other):
            for b in range(a + 1):
                outer[place] = y[a] * y[b]
                place += 1
        for e in range(starts[i], starts[i + 1]):
            j = columns[e]
            weight = float(weights[e]) if len(weights) else 1.0
            for k in range(other_packed):
                grams[j, k] += weight * outer[k]
            target = float(values[e]) - left[i, rank]
            if not of_columns:
                target -= right[j, rank + 1]
            target *= weight
            for a in range(other):
                grams[j, other_packed + a] += target * y[a]
    return total


@compiled
def gram_rows(starts: Array, columns: Array, values: Array, gram: Array, first: int, last: int) -> None:
    """Add the products of each two entries of a row, of columns j ≥ k, to `gram[j, k]`."""
    for i in range(first, last):
        for e in range(starts[i], starts[i + 1]):
            value, j = values[e], columns[e]
            for f in range(starts[i], e + 1):
                gram[j, columns[f]] += value * values[f]
