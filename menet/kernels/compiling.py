"""How loops are compiled, and what they share."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pooch
from numpy.typing import NDArray

Array = NDArray[np.floating]
Number = float | np.floating

REGISTER = 16
"""Rows are padded to whole vector registers, and loops run over the padding: shorter ones are no faster."""


def compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call, free of the interpreter's lock; keep the result on disk if there is a place.

    In `function`, constants next to numbers of an array must be of the array's kind: a plain 2 or 1.0 would turn
    single precision into double, and loops around it run at half the speed.
    """
    # Sums may be reordered and products fused. Not more: NaN and infinity keep their meaning, and a quotient
    # stays one, because the reciprocal of a tiny number may be infinite where the quotient is not.
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(_folder())
        return numba.njit(cache=True, **options)(function)
    except (RuntimeError, OSError):  # nowhere to keep the compiled code
        return numba.njit(**options)(function)
    finally:
        numba.config.CACHE_DIR = before


@cache
def _folder() -> Path:
    """Where compiled code is kept: a folder of these sources' content.

    Left to itself, numba looks only at the file of the function itself, and would keep code compiled from what
    another file was before.
    """
    content = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        content.update(source.read_bytes())
    return Path(pooch.os_cache("menet")) / "compiled" / content.hexdigest()[:16]


@compiled
def padded(size: int) -> int:
    """`size` rounded up to whole registers."""
    return (size + REGISTER - 1) // REGISTER * REGISTER


@compiled
def local_average(a: Array, unseen: Array, size: int, out: Array) -> None:
    """Each entry the mean of the seen ones among its 3×3 neighbours, with a little of the mean of all mixed in.

    `a` is zero where `unseen` is one; only the first `size` columns count.
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
