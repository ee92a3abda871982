"""The observed entries of one large or sparse matrix, from what people have: arrays, tensors, sparse matrices."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from menet import linalg
from menet.errors import ConfigurationError

Array = NDArray[Any]

# Sparse products smaller than this are not worth a second thread.
ENTRIES_PER_THREAD = 50_000
LARGEST_VALUE = 1e140


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
