"""Loops compiled by numba, for a CPU, where torch would spend its time on calls and on passes over memory.

Each has a form in torch beside the code that calls it: for other devices, for larger matrices, and for where
numba is not installed. The modules here are imported when they are first called, because numba takes a while to
load. Compiled code is kept in the user's cache folder, so that it is compiled once.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor

LARGEST = 96
"""Columns from about which the blocked algorithms of LAPACK win over ours."""


def suit(x: Tensor) -> bool:
    """Whether compiled loops are the right ones for matrices like `x`."""
    return x.device.type == "cpu" and x.shape[-1] <= LARGEST and _available()


@cache
def _available() -> bool:
    return find_spec("numba") is not None
