"""Loops compiled by numba, for a CPU, where torch would spend its time on calls and on passes over memory.

Each has an equivalent in torch beside the code that calls it: for other devices, for larger matrices, and for
systems without numba. The modules here are imported at their first call, because numba takes a while to load.
Compiled code is stored in the user's cache folder (`compiling.py`), so that each machine compiles it once.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor

LARGEST = 96
"""The number of columns from which the blocked algorithms of LAPACK are faster."""
LARGEST_SOLVED = 640
"""The same for a whole solver, most of whose time goes into what is between its decompositions."""


def suit(x: Tensor, largest: int = LARGEST) -> bool:
    """Whether to use the compiled loops for matrices like `x`, which have at most `largest` columns."""
    return x.device.type == "cpu" and x.shape[-1] <= largest and _available()


@cache
def _available() -> bool:
    return find_spec("numba") is not None
