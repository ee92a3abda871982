"""The ablation: pixels dropped, nothing estimated."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from menet.estimators.checks import Gradient, estimator


@estimator(dimensions=2)
def mask_only(x: Tensor, mask: Tensor) -> Tensor:
    """`(..., m, n)` with zeros where nothing is observed (mid-grey on the scale [-1, 1])."""
    return x


@dataclass(frozen=True)
class MaskOnly:
    """`mask_only`, to tell what masking does from what estimating adds."""

    dimensions: ClassVar[int] = 2
    gradient: Gradient = "exact"

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return mask_only(x, mask, gradient=self.gradient)
