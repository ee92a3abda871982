"""The words that every attack's signature uses."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

Model = Callable[[Tensor], Tensor]
"""Anything that takes images (B,C,H,W) in [0,1] and gives logits (B,K)."""

Images = Float[Tensor, "b c h w"]
Labels = Int[Tensor, " b"]
Losses = Float[Tensor, " b"]
