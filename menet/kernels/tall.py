"""Loops over the observed entries of one matrix with many more rows than columns, for its completion by factors.

What belongs to the columns stays in the processor's cache, so that one pass over the rows does for rows and
columns what takes a pass over each of two copies in `factors.py`. The layout is the same as there: entries in
compressed rows, their columns ascending, `left` as [U, a, 1] and `right` as [V, 1, b] with effects a and b of
rows and columns. Symmetric matrices are packed: the lower triangle by rows.
"""

import numpy as np

from menet.kernels.compiling import Array, compiled


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
