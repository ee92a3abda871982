"""Images as matrices: the first and the last step of the defense."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from menet.errors import ConfigurationError

Channels = Literal["joint", "separate"]


def to_matrix(images: Float[Tensor, "*batch c h w"], channels: Channels = "joint") -> Tensor:
    """Matrices with entries in [-1, 1] from images with pixels in [0, 1].

    `joint` puts the channels side by side, `[R G B]`, as the paper does: `(*batch, h, c·w)`.
    `separate` keeps one matrix per channel: `(*batch, c, h, w)`.
    """
    _check(channels)
    scaled = images * 2 - 1
    return join_channels(scaled) if channels == "joint" else scaled


def to_image(matrices: Tensor, shape: torch.Size | tuple[int, ...], channels: Channels = "joint") -> Tensor:
    """Images of `shape` `(*batch, c, h, w)` from matrices of `to_matrix`, clipped to [0, 1]."""
    _check(channels)
    if channels == "joint":
        matrices = split_channels(matrices, shape[-3])
    return ((matrices + 1) / 2).clamp(0, 1)


def join_channels(x: Tensor) -> Tensor:
    """Images or masks `(*batch, c, h, w)` with their channels side by side: `(*batch, h, c·w)`."""
    return x.movedim(-3, -2).flatten(-2)


def split_channels(x: Tensor, channels: int) -> Tensor:
    """The inverse of `join_channels`."""
    return x.unflatten(-1, (channels, x.shape[-1] // channels)).movedim(-2, -3)


def _check(channels: str) -> None:
    if channels not in get_args(Channels):
        raise ConfigurationError(f"unknown channels {channels!r}; choose from {', '.join(get_args(Channels))}")
