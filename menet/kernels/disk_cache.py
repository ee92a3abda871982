"""Compiled code on disk, one file per function and signature; a bad file or folder never fails a computation.

This takes the place of numba's own cache, which unpickles whatever it finds, raises when it cannot write, and
writes into the package when the user's cache folder is read-only.
"""

import hashlib
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import pooch
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from menet.files import write_atomically

_VERSIONS = (numba.__version__, version("llvmlite"), sys.implementation.cache_tag)
_DIGEST = hashlib.sha256().digest_size


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
    print("compiling the estimators' loops (once, about 20 s)…", file=sys.stderr, flush=True)


@cache
def _warn_unwritable(reason: str) -> None:
    warnings.warn(
        f"cannot store compiled loops in {folder()} ({reason}); every process compiles them again. "
        "Free space, or set XDG_CACHE_HOME to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
