"""The ablation: entries are dropped and nothing is estimated."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from menet.estimators.base import estimator, register


@estimator(dimensions=2)
def mask_only(x: Tensor, mask: Tensor) -> Tensor:
    """`(..., m, n)` with zeros at unobserved entries (mid-gray on the scale [-1, 1])."""
    return x


@register("mask-only")
@dataclass(frozen=True)
class MaskOnly:
    """`mask_only`, to separate the effect of masking from that of estimation."""

    dimensions: ClassVar[int] = 2

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return mask_only(x, mask)
