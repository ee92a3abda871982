"""How loops are compiled and stored, and what they share.

Results must not depend on whether code was compiled now or loaded from disk. By default numba compiles a helper
twice: as a function of its own, and again inside each caller, where sums may be reordered in another way. Both
get the same weak symbol, and the linker takes whichever was loaded first. So here only what Python calls is a
function to the linker (`compiled`); everything else is always inlined (`inlined`), and no symbol is shared.

Compiled code is stored on disk, one file per function and signature; a bad file or folder never fails a
computation. This replaces numba's own cache, which unpickles any file it finds, raises when it cannot write, and
writes into the package when the user's cache folder is read-only.
"""

import hashlib
import inspect
import math
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pooch
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numpy.typing import NDArray

from menet.files import write_atomically
from menet.kernels.lanes import BYTES, choose, everywhere, load, magnitude, store

Array = NDArray[np.floating]
Number = float | np.floating

REGISTER = 16
"""Rows are padded to whole vector registers, and loops run over the padding: shorter ones are no faster."""

# Sums may be reordered and products fused. Not more: NaN and infinity keep their meaning, and a quotient stays
# one, because the reciprocal of a tiny number may be infinite where the quotient is not.
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}

_VERSIONS = (numba.__version__, version("llvmlite"), sys.implementation.cache_tag)
_DIGEST = hashlib.sha256().digest_size


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
def scale_of(x: Array, tiny: Number) -> Number:
    """A power of two close to the largest entry: division by it is exact, and squares do not overflow."""
    kind = x.dtype
    entries, lanes = x.reshape(x.size), BYTES // x.itemsize
    # By hand: compilers leave comparisons, which must not lose a NaN, one after another.
    each = np.zeros(lanes, kind)
    found = everywhere(entries, kind.type(0))
    for k in range(len(entries) // lanes):
        entry = magnitude(load(entries, k))
        found = choose(entry > found, entry, found)
    store(each, 0, found)
    largest = kind.type(0)
    for k in range(lanes):
        largest = max(largest, each[k])
    for k in range(len(entries) // lanes * lanes, len(entries)):
        largest = max(largest, abs(entries[k]))
    if largest <= tiny:
        return x.dtype.type(1) if largest == 0 else tiny
    return x.dtype.type(math.ldexp(1.0, math.frexp(largest)[1] - 1))


@inlined
def local_average(a: Array, unseen: Array, size: int, out: Array) -> None:
    """Each entry becomes the mean of the observed ones among its 3×3 neighbors, mixed with a little of the mean.

    `a` is zero where `unseen` is one; only the first `size` columns are used. In torch: `estimators.newton`.
    """
    rows, width = a.shape
    kind = a.dtype
    one, little = kind.type(1), kind.type(0.1)
    mean = sum_of(a) / max(kind.type(rows * size) - sum_of(unseen), one)
    # Sums and counts of three neighbors in a row, for the row above, this one and the one below.
    sums, counts = np.zeros((3, width), kind), np.zeros((3, width), kind)
    for r in range(rows + 1):
        below = r % 3
        if r < rows:
            for k in range(1, size - 1):
                sums[below, k] = a[r, k - 1] + a[r, k] + a[r, k + 1]
                counts[below, k] = kind.type(3) - (unseen[r, k - 1] + unseen[r, k] + unseen[r, k + 1])
            for k, beside in ((0, min(1, size - 1)), (size - 1, max(size - 2, 0))):
                other = kind.type(k != beside)
                sums[below, k] = a[r, k] + other * a[r, beside]
                counts[below, k] = one - unseen[r, k] + other * (one - unseen[r, beside])
        else:
            sums[below], counts[below] = 0, 0
        if r > 0:
            for k in range(size):
                total = sums[0, k] + sums[1, k] + sums[2, k] + little * mean
                out[r - 1, k] = total / (counts[0, k] + counts[1, k] + counts[2, k] + little)


@inlined
def sum_of(x: Array) -> Number:
    """The sum of all entries, in one loop: over rows, each row would end in a slow sum of lanes."""
    entries, total = x.reshape(x.size), x.dtype.type(0)
    for k in range(len(entries)):
        total += entries[k]
    return total


class DiskCache:
    """What numba asks of the cache of one function: `load_overload` before it compiles, `save_overload` after.

    A file is a SHA-256 digest and then the pickle that it is the digest of. The digest detects damage; a forged
    file it does not, but whoever can write to the user's cache can run code as the user anyway.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = f"{function.__module__}.{function.__qualname__}"

    @property
    def cache_path(self) -> str:
        return str(folder())

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function, or None if it must be compiled, which is announced."""
        target.refresh()
        path = self._path(signature, target.codegen())
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        digest, data = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(data).digest() == digest:
            return CompileResult._rebuild(target, *pickle.loads(data))
        if content:
            warnings.warn(f"{path} is damaged; compiling it again", RuntimeWarning, stacklevel=2)
        _announce()
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write the compiled function to disk, or warn once that it stays in memory."""
        data = dumps(result._reduce())
        try:
            write_atomically(self._path(signature, result.codegen), hashlib.sha256(data).digest() + data)
        except OSError as error:
            _warn_unwritable(error.strerror or str(error))

    def _path(self, signature: Any, codegen: Any) -> Path:
        # The codegen's tuple names the processor and its instructions.
        key = repr((signature, codegen.magic_tuple(), *_VERSIONS))
        return folder() / f"{self.function}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"


@cache
def folder() -> Path:
    """Where compiled code is stored: a folder named by the content of all sources here.

    The file of a function alone would not do, because the code of its callees from other files is part of it.
    """
    content = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        content.update(source.read_bytes())
    return Path(pooch.os_cache("menet")) / "compiled" / content.hexdigest()[:16]


@cache
def _announce() -> None:
    print("compiling the estimators' loops (once, about a minute)…", file=sys.stderr, flush=True)


@cache
def _warn_unwritable(reason: str) -> None:
    warnings.warn(
        f"cannot store compiled loops in {folder()} ({reason}); every process compiles them again. "
        "Free space, or set XDG_CACHE_HOME to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
