"""One large or sparse matrix: its observed entries, from what people have, and its completion, as factors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from menet import linalg
from menet.errors import ConfigurationError
from menet.estimators.base import Effects

Array = NDArray[Any]

# Sparse products smaller than this are not worth a second thread.
ENTRIES_PER_THREAD = 50_000
LARGEST_VALUE = 1e140
# Up to the first side, and up to the second where there are at least as many entries as in the Gram matrix, a
# full decomposition of it is faster than Lanczos iterations.
SMALL_SIDE, LARGEST_SIDE = 64, 1500


class Entries(NamedTuple):
    """The observed entries of a matrix by rows; `weights` is empty where all are one."""

    shape: tuple[int, int]
    starts: Array
    columns: Array
    values: Array
    weights: Array

    @staticmethod
    def of(shape: tuple[int, ...], starts: Array, columns: Array, values: Array, weights: Array) -> "Entries":
        """In the integer types that the loops are compiled for: every other combination would compile again."""
        rows, width = shape
        weights = np.ascontiguousarray(weights, dtype=np.float64)
        return Entries(
            (rows, width), starts.astype(np.int64), columns.astype(np.int32, copy=False), values, weights
        )

    @property
    def transposed(self) -> "Entries":
        """The same entries by columns."""
        turned = [
            scipy.sparse.csr_array((part, self.columns, self.starts), shape=self.shape).tocsc()
            for part in (self.values, self.weights)
            if len(part) == len(self.columns)
        ]
        weights = turned[1].data if len(turned) > 1 else self.weights
        return Entries.of(self.shape[::-1], turned[0].indptr, turned[0].indices, turned[0].data, weights)

    @property
    def rows(self) -> Array:
        """The row of each entry."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.starts))

    def chosen(self, kept: Array) -> "Entries":
        """The entries marked in `kept`."""
        counts = np.concatenate(([0], np.cumsum(kept)))[self.starts]
        weights = self.weights[kept] if len(self.weights) else self.weights
        return Entries.of(self.shape, counts, self.columns[kept], self.values[kept], weights)

    def residuals(self, left: Array, right: Array, out: Array, product: Array | None = None) -> float:
        """Weighted residuals of `left @ right.T` into `out`, times `right` into `product`; half their squares."""
        from menet.kernels.factors import residual_rows

        product = np.empty((0, right.shape[1])) if product is None else product
        return float(sum(self.over_rows(residual_rows, self.values, self.weights, left, right, out, product)))

    def over_rows(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a loop of `kernels.factors` on ranges of rows with about as many entries each, in threads."""
        threads = min(torch.get_num_threads(), 1 + len(self.columns) // ENTRIES_PER_THREAD)
        if threads == 1:
            return [function(self.starts, self.columns, *arguments, 0, self.shape[0])]
        parts = np.linspace(0, len(self.columns), 4 * threads + 1)
        bounds = np.searchsorted(self.starts, parts)
        bounds[0], bounds[-1] = 0, self.shape[0]
        workers = linalg.pool(threads)
        tasks = [
            workers.submit(function, self.starts, self.columns, *arguments, int(first), int(last))
            for first, last in pairwise(bounds)
        ]
        return [task.result() for task in tasks]


def observed_entries(x: Any, mask: Any = None, weights: Any = None) -> Entries:
    """The observed entries of `x`, checked.

    Of a sparse matrix (`scipy.sparse`, torch's COO and CSR) those that are stored, zeros included; `weights` then
    has one number for each, in the order of `x`'s coordinates by rows, or is a sparse matrix with the same
    entries. Of a dense one (array or tensor) those where `mask` is True, or without a mask those that are not
    NaN; `weights` then has the shape of `x`. Entries of weight zero count as unobserved.
    """
    if isinstance(x, Entries):
        return x
    if isinstance(x, Tensor) and x.layout != torch.strided:
        x = _from_torch(x)
    if scipy.sparse.issparse(x):
        if mask is not None:
            raise ConfigurationError(
                "expected no mask with a sparse matrix, whose stored entries are the observed ones"
            )
        entries = _from_sparse(x, weights)
    else:
        entries = _from_dense(x, mask, weights)
    if not np.isfinite(entries.values).all():
        raise ConfigurationError("expected finite values at observed entries, got NaN or infinity")
    largest = float(np.abs(entries.values).max(initial=0))
    if largest > LARGEST_VALUE:
        raise ConfigurationError(
            f"expected values of at most {LARGEST_VALUE:.0e}, got {largest:.0e}, whose square overflows; scale x"
        )
    if len(entries.weights):
        if not (np.isfinite(entries.weights).all() and entries.weights.min() >= 0):
            raise ConfigurationError(f"expected finite weights >= 0, got {entries.weights.min()}")
        if entries.weights.min() == 0:
            entries = entries.chosen(entries.weights > 0)
    return entries


def _from_torch(x: Tensor) -> Any:
    x = x.detach().cpu()
    if x.layout == torch.sparse_coo and x.ndim == 2:
        rows, columns = x._indices().numpy()
        return scipy.sparse.coo_array((x._values().numpy(), (rows, columns)), shape=tuple(x.shape))
    if x.layout == torch.sparse_csr and x.ndim == 2:
        parts = (x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy())
        return scipy.sparse.csr_array(parts, shape=tuple(x.shape))
    raise ConfigurationError(
        f"expected a sparse matrix in COO or CSR layout, got {x.layout} of {x.ndim} dimensions"
    )


def _from_sparse(x: Any, weights: Any) -> Entries:
    _check_shape(x.shape)
    if hasattr(x, "check_format"):
        # The loops trust the indices; made by hand or read from a file, they may lie outside the matrix.
        try:
            x.check_format(full_check=True)
        except ValueError as error:
            raise ConfigurationError(
                f"expected a valid sparse matrix, got one with bad indices: {error}"
            ) from error
    stored = x.nnz
    rows = x.tocsr()
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    if rows.nnz != stored:
        raise ConfigurationError(
            f"expected each entry once, got a sparse matrix with {stored - rows.nnz} duplicates; "
            "merge them (x.sum_duplicates() adds them up), or keep one"
        )
    given = np.empty(0)
    if weights is not None:
        if scipy.sparse.issparse(weights):
            aligned = weights.tocsr().copy()
            aligned.sort_indices()
            same = aligned.shape == rows.shape and aligned.nnz == rows.nnz
            if not same or not np.array_equal(aligned.indices, rows.indices):
                raise ConfigurationError("expected weights with the same stored entries as x, got others")
            weights = aligned.data
        given = _numbers("weights", weights)
        if given.shape != (rows.nnz,):
            raise ConfigurationError(
                f"expected one weight for each of {rows.nnz} entries, got shape {given.shape}"
            )
    return Entries.of(rows.shape, rows.indptr, rows.indices, _numbers("x", rows.data), given)


def _from_dense(x: Any, mask: Any, weights: Any) -> Entries:
    values = _numbers("x", x)
    _check_shape(values.shape)
    if mask is None:
        observed = ~np.isnan(values)
    else:
        observed = np.asarray(mask.detach().cpu() if isinstance(mask, Tensor) else mask)
        if observed.dtype != np.bool_:
            raise TypeError(f"expected a mask of booleans (True where observed), got {observed.dtype}")
        if observed.shape != values.shape:
            raise ConfigurationError(f"expected a mask of shape {values.shape}, got {observed.shape}")
    starts = np.concatenate(([0], np.cumsum(observed.sum(1))))
    given = np.empty(0)
    if weights is not None:
        dense = _numbers("weights", weights)
        if dense.shape != values.shape:
            raise ConfigurationError(f"expected weights of shape {values.shape}, got {dense.shape}")
        given = dense[observed]
    return Entries.of(values.shape, starts, np.nonzero(observed)[1], values[observed], given)


def _numbers(name: str, x: Any) -> Array:
    """`x` as an array of floating-point numbers."""
    array = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"expected {name} to hold real numbers, got {array.dtype}; encode categories as numbers first"
        )
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) != 2 or 0 in shape:
        raise ConfigurationError(f"expected a matrix with at least one row and column, got shape {tuple(shape)}")


@dataclass(frozen=True)
class Completion:
    """A completed matrix, as factors: the estimate is `left @ right.T` plus effects, clipped to `bounds`.

    `gap` is the duality gap relative to the objective: the objective is at most that much above the minimum. With
    a limit on the rank that binds, it stays above the tolerance. The spectral norm in it is that of Lanczos
    iterations, converged to a tenth of the tolerance.
    """

    left: Array
    right: Array
    row_effects: Array
    column_effects: Array
    shrinkage: float
    objective: float
    gap: float
    sweeps: int
    effects: Effects = "none"
    bounds: tuple[float, float] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), len(self.right)

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @cached_property
    def singular_values(self) -> Array:
        """Of the estimate without effects, in falling order."""
        return singular_values_of(self.left, self.right)

    def dense(self) -> Array:
        """The whole estimate; for a large matrix ask for entries by `at` instead."""
        estimate = self.left @ self.right.T + self.row_effects[:, None] + self.column_effects
        return estimate if self.bounds is None else estimate.clip(*self.bounds)

    def at(self, rows: ArrayLike, columns: ArrayLike) -> Array:
        """The estimates of single entries."""
        rows, columns = np.asarray(rows), np.asarray(columns)
        found = np.einsum("ek,ek->e", self.left[rows], self.right[columns])
        found += self.row_effects[rows] + self.column_effects[columns]
        return found if self.bounds is None else found.clip(*self.bounds)

    def project(self, x: Any, mask: Any = None, weights: Any = None) -> "Completion":
        """New rows, given as `complete` takes them, completed by the factor and column effects learned.

        Each is the ridge regression that gives the rows of the completion itself. A row without observed entries
        is zero, plus the column effects.
        """
        entries = observed_entries(x, mask, weights)
        if entries.shape[1] != len(self.right):
            raise ConfigurationError(f"expected rows of {len(self.right)} columns, got {entries.shape[1]}")
        model = Model(entries, self.shrinkage, self.effects)
        left, right = model.assemble(
            np.zeros((entries.shape[0], self.rank)), self.right, np.zeros(entries.shape[0]), self.column_effects
        )
        model.solve(entries, left, right, model.free_left)
        return replace(self, left=left[:, : self.rank], row_effects=left[:, self.rank].copy(), gap=np.nan)


class Spectrum(NamedTuple):
    """Of the residual: its leading singular triplets outside the factors, a bound on its norm, and uᵀRv of each
    pair of singular vectors of the factors, which is λ at the minimum."""

    left: Array
    values: Array
    right: Array
    norm: float
    along: Array


class Model:
    """The factors with effects beside them, and the residual that they leave.

    `left` is [U, a, 1] and `right` [V, 1, b], of r + 2 columns.
    """

    def __init__(self, entries: Entries, shrinkage: float, effects: Effects) -> None:
        self.entries, self.shrinkage = entries, shrinkage
        self.of_rows, self.of_columns = effects in ("rows", "both"), effects in ("columns", "both")

    @staticmethod
    def assemble(left: Array, right: Array, rows: Array, columns: Array) -> tuple[Array, Array]:
        """The two factors in the layout of the compiled loops."""
        return (
            np.column_stack([left, rows, np.ones(len(left))]),
            np.column_stack([right, np.ones(len(right)), columns]),
        )

    def free_left(self, rank: int) -> list[int]:
        return [*range(rank), *([rank] if self.of_rows else [])]

    def free_right(self, rank: int) -> list[int]:
        return [*range(rank), *([rank + 1] if self.of_columns else [])]

    def solve(self, entries: Entries, left: Array, right: Array, free: Callable[[int], list[int]]) -> float:
        """Minimize over the free columns of `left`, in place; the minimum without the penalty on `right`."""
        from menet.kernels.factors import solve_rows

        rank = left.shape[1] - 2
        chosen = np.array(free(rank), dtype=np.int64)
        if not len(chosen):
            return 0.0
        penalty = np.where(chosen < rank, self.shrinkage, 0.0)
        return sum(entries.over_rows(solve_rows, entries.values, entries.weights, left, right, chosen, penalty))

    @cached_property
    def across(self) -> Entries:
        """The entries by columns."""
        return self.entries.transposed

    @cached_property
    def residuals(self) -> Array:
        """The weighted residuals that `residual` stores."""
        return np.zeros(len(self.entries.values))

    def residual(self, left: Array, right: Array) -> float:
        """Store the weighted residuals; half the weighted sum of squares."""
        return self.entries.residuals(left, right, self.residuals)

    def gap(self, objective: float, norm: float) -> float:
        """The relative duality gap; any multiple of the residual of spectral norm at most λ is feasible."""
        entries, residuals = self.entries, self.residuals
        scale = min(1.0, self.shrinkage / norm) if norm > 0 else 1.0
        linear = float(residuals @ entries.values)
        weighted = residuals / entries.weights if len(entries.weights) else residuals
        dual = scale * linear - 0.5 * scale**2 * float(residuals @ weighted)
        return max(0.0, objective - dual) / objective if objective > 0 else 0.0

    def spectrum(self, left: Array, right: Array, count: int, tol: float) -> Spectrum:
        """The spectrum of the stored residual, with `count` triplets, to a tenth of `tol`.

        Inside the factors all singular values of the residual are about λ, which Lanczos iterations could not
        separate. The norm is at most that of the 2×2 matrix of norms of its parts.
        """
        rows, columns = self.entries.shape
        rank = left.shape[1] - 2
        matrix = scipy.sparse.csr_array(
            (self.residuals, self.entries.columns, self.entries.starts), (rows, columns)
        )
        (base, small), (other, inner) = (np.linalg.qr(side[:, :rank]) for side in (left, right))
        image, preimage = matrix @ other, matrix.T @ base
        inside = base.T @ image
        if columns <= SMALL_SIDE or (columns <= LARGEST_SIDE and columns**2 <= len(self.residuals)):
            gram = self.gram() - preimage @ preimage.T
            gram -= other @ (other.T @ gram)
            gram -= (gram @ other) @ other.T
            squares, vectors = np.linalg.eigh((gram + gram.T) / 2)
            vectors, values = vectors[:, ::-1][:, :count], np.sqrt(squares[::-1][:count].clip(min=0))
            vectors -= other @ (other.T @ vectors)
            turned = matrix @ vectors
            turned = (turned - base @ (base.T @ turned)) / np.where(values > 0, values, 1.0)
        else:

            def forward(x: Array) -> Array:
                y = matrix @ (x - other @ (other.T @ x))
                return y - base @ (base.T @ y)

            def backward(y: Array) -> Array:
                x = matrix.T @ (y - base @ (base.T @ y))
                return x - other @ (other.T @ x)

            operator = scipy.sparse.linalg.LinearOperator(
                (rows, columns), matvec=forward, rmatvec=backward, dtype=np.float64
            )
            start = np.random.default_rng(0).standard_normal(columns)
            turned, values, vectors = scipy.sparse.linalg.svds(
                operator, k=min(count, columns - 1), v0=start, tol=min(1e-4, 0.1 * tol), maxiter=2_000
            )
            order = np.argsort(values)[::-1]
            turned, values, vectors = turned[:, order], values[order], vectors[order].T
        outside = values.max(initial=0)
        if not rank:
            return Spectrum(turned, values, vectors, float(outside), np.zeros(0))
        blocks = np.array(
            [
                [np.linalg.norm(inside, 2), np.linalg.norm(preimage - other @ inside.T)],
                [np.linalg.norm(image - base @ inside), outside],
            ]
        )
        # Balanced factors have orthogonal columns, so their bases are their singular vectors up to signs.
        along = np.diag(inside) * np.sign(np.diag(small) * np.diag(inner))
        return Spectrum(turned, values, vectors, float(np.linalg.norm(blocks, 2)), along)

    def gram(self) -> Array:
        """The residual's Gram matrix of columns."""
        from menet.kernels.factors import gram_rows

        side = self.entries.shape[1]

        def part(*arguments: Any) -> Array:
            gram = np.zeros((side, side))
            gram_rows(*arguments[:-2], gram, *arguments[-2:])
            return gram

        gram: Array = np.sum(self.entries.over_rows(part, self.residuals), axis=0)
        return gram + np.tril(gram, -1).T


def singular_values_of(left: Array, right: Array) -> Array:
    """Of `left @ right.T`."""
    if not left.shape[1]:
        return np.zeros(0)
    values: Array = np.linalg.svd(np.linalg.qr(left)[1] @ np.linalg.qr(right)[1].T, compute_uv=False)
    return values
