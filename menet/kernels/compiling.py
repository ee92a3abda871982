"""How loops are compiled, and what they share.

Results must not depend on whether code was compiled now or loaded from disk. By default numba compiles a helper
twice: as a function of its own, and again inside each caller, where sums may be reordered in another way. Both
get the same weak symbol, and the linker takes whichever was loaded first. So here only what Python calls is a
function to the linker (`compiled`); everything else is always inlined (`inlined`), and no symbol is shared.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from menet.kernels.disk_cache import DiskCache

Array = NDArray[np.floating]
Number = float | np.floating

REGISTER = 16
"""Rows are padded to whole vector registers, and loops run over the padding: shorter ones are no faster."""

# Sums may be reordered and products fused. Not more: NaN and infinity keep their meaning, and a quotient stays
# one, because the reciprocal of a tiny number may be infinite where the quotient is not.
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call, free of the interpreter's lock, and store the result on disk.

    For functions that Python calls, never for functions that compiled ones call. In `function`, constants next to
    entries of an array must have the array's dtype: a plain 2 or 1.0 would turn single precision into double, and
    loops around it run at half the speed.
    """
    dispatcher = numba.njit(**_OPTIONS)(inspect.unwrap(function))
    dispatcher._cache = DiskCache(dispatcher.py_func)
    return dispatcher


def inlined(function: Callable[..., Any]) -> Any:
    """Compile as part of each compiled function that calls it; constants as for `compiled`."""
    return numba.njit(forceinline=True, **_OPTIONS)(inspect.unwrap(function))


@inlined
def padded(size: int) -> int:
    """`size` rounded up to whole registers."""
    return (size + REGISTER - 1) // REGISTER * REGISTER


@inlined
def local_average(a: Array, unseen: Array, size: int, out: Array) -> None:
    """Each entry becomes the mean of the observed ones among its 3×3 neighbors, mixed with a little of the mean.

    `a` is zero where `unseen` is one; only the first `size` columns are used. In torch: `estimators.solver`.
    """
    rows = len(a)
    kind = a.dtype
    zero, one, little = kind.type(0), kind.type(1), kind.type(0.1)
    seen, total = zero, zero
    for r in range(rows):
        for k in range(size):
            total += a[r, k]
            seen += one - unseen[r, k]
    mean = total / max(seen, one)
    sums, counts = np.zeros(size + 2, kind), np.zeros(size + 2, kind)
    for r in range(rows):
        for k in range(size):
            sums[k + 1] = zero
            counts[k + 1] = zero
        for near in range(max(r - 1, 0), min(r + 2, rows)):
            for k in range(size):
                sums[k + 1] += a[near, k]
                counts[k + 1] += one - unseen[near, k]
        for k in range(size):
            above = sums[k] + sums[k + 1] + sums[k + 2] + little * mean
            out[r, k] = above / (counts[k] + counts[k + 1] + counts[k + 2] + little)
