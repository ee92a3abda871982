"""Matrix estimators: batched, differentiable, each a function and a frozen dataclass of its parameters."""

import difflib
from typing import Protocol, runtime_checkable

import torch

from menet.estimators.checks import Gradient
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
    "NuclearNorm",
    "SoftImpute",
    "Solution",
    "Tensor",
    "build",
    "nuclear_norm",
    "soft_impute",
    "tensor",
    "usvt",
]


@runtime_checkable
class Estimator(Protocol):
    """What the defense asks of an estimator: an estimate of `x` from the entries where `mask` is True."""

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor: ...


ESTIMATORS: dict[str, type] = {
    "usvt": USVT,
    "soft-impute": SoftImpute,
    "nuclear-norm": NuclearNorm,
    "tensor": Tensor,
}


def build(name: str, **parameters: object) -> Estimator:
    """The estimator of that name with its default parameters, or those given."""
    if name not in ESTIMATORS:
        close = difflib.get_close_matches(name, ESTIMATORS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"estimator is {name!r}; accepted are {', '.join(map(repr, ESTIMATORS))}{hint}")
    estimator: Estimator = ESTIMATORS[name](**parameters)
    return estimator
