"""Whether the compiled loops of `kernels.py` can take a tensor: they are for a CPU, small matrices, and numba."""

from functools import cache
from types import ModuleType

from torch import Tensor

LARGEST = 96
"""Columns from about which the blocked algorithms of LAPACK win over ours."""


def kernels_for(x: Tensor) -> ModuleType | None:
    """The module of compiled loops if it is the right one for matrices like `x`, else nothing: torch does it."""
    return _kernels() if x.device.type == "cpu" and x.shape[-1] <= LARGEST else None


@cache
def _kernels() -> ModuleType | None:
    # Imported at the first use, because numba takes a while to load.
    try:
        from menet import kernels
    except ImportError:
        return None
    return kernels
