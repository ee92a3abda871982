"""Matrix estimators: batched, differentiable, each a function and a frozen dataclass of its parameters."""

import difflib
from typing import Protocol, runtime_checkable

import torch

from menet.estimators.checks import Gradient
from menet.estimators.mask_only import MaskOnly, mask_only
from menet.estimators.nuclear_norm import NuclearNorm, nuclear_norm
from menet.estimators.soft_impute import SoftImpute, soft_impute
from menet.estimators.solver import Solution
from menet.estimators.tensor import Tensor, tensor
from menet.estimators.usvt import USVT, usvt

__all__ = [
    "ESTIMATORS",
    "USVT",
    "Estimator",
    "Gradient",
    "MaskOnly",
    "NuclearNorm",
    "SoftImpute",
    "Solution",
    "Tensor",
    "build",
    "mask_only",
    "name_of",
    "nuclear_norm",
    "soft_impute",
    "tensor",
    "usvt",
]


@runtime_checkable
class Estimator(Protocol):
    """What the defense asks of an estimator: an estimate of `x` from the entries where `mask` is True.

    One with the class attribute `dimensions = 3` is given `(..., channels, rows, columns)`, any other matrices.
    """

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor: ...


ESTIMATORS: dict[str, type] = {
    "usvt": USVT,
    "soft-impute": SoftImpute,
    "nuclear-norm": NuclearNorm,
    "tensor": Tensor,
    "mask-only": MaskOnly,
}


def name_of(estimator: Estimator) -> str:
    """The name `build` knows the estimator by."""
    for name, kind in ESTIMATORS.items():
        if type(estimator) is kind:
            return name
    raise ValueError(f"estimator is {estimator!r}; it has no name, which a checkpoint needs to rebuild it")


def build(name: str, **parameters: object) -> Estimator:
    """The estimator of that name with its default parameters, or those given."""
    if name not in ESTIMATORS:
        close = difflib.get_close_matches(name, ESTIMATORS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"estimator is {name!r}; accepted are {', '.join(map(repr, ESTIMATORS))}{hint}")
    estimator: Estimator = ESTIMATORS[name](**parameters)
    return estimator
