"""Random resizing and padding (Xie, Wang, Zhang, Ren & Yuille, 2018)."""

from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import interpolate

from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed

Interpolation = Literal["nearest", "bilinear"]


class ResizePad(Preprocessed):
    """`classifier` of images resized at random and put at a random place in a black frame, each image its own.

    Sizes are shares of the side: images are resized to a side drawn evenly from `smallest` to `largest` and the
    frame has the side `largest`. The authors enlarge, 299 → 299…331 in a frame of 331, which is
    `smallest=1, largest=331/299`; the default has the same ratio but keeps the side, so any network fits. They
    train no network for it and interpolate by the nearest pixel. `gradient="exact"` is exact for what was drawn.
    `bpda` takes all that for the identity, or, where the frame is larger, for resizing to the frame.
    """

    name: ClassVar[str] = "resize-pad"

    def __init__(
        self,
        classifier: nn.Module,
        smallest: float = 0.9,
        largest: float = 1.0,
        interpolation: Interpolation = "nearest",
        gradient: Gradient = "exact",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 0 < smallest <= largest <= 8:
            raise ConfigurationError(
                f"smallest and largest are {smallest} and {largest}; accepted are 0 < smallest ≤ largest ≤ 8"
            )
        if interpolation not in get_args(Interpolation):
            raise ConfigurationError(f"interpolation is {interpolation!r}; accepted are 'nearest' and 'bilinear'")
        self.smallest, self.largest = smallest, largest
        self.interpolation: Interpolation = interpolation

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        # One share for both sides keeps the shape; the places are drawn apart.
        drawn = self.draw(lambda count: torch.rand(count, 3, generator=generator), len(images))
        share, *places = drawn.to(images.device).unbind(1)
        rows, columns = (
            self._resampling(images, dim, share, place) for dim, place in zip((-2, -1), places, strict=True)
        )
        return rows[:, None] @ images @ columns[:, None].mT

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Tensor:
        height, width = (self._range(side)[1] for side in images.shape[-2:])
        if (height, width) == tuple(images.shape[-2:]):
            return images
        return interpolate(images, (height, width), mode="nearest")

    def settings(self) -> dict[str, Any]:
        return {
            "smallest": self.smallest,
            "largest": self.largest,
            "interpolation": self.interpolation,
            "gradient": self.gradient,
        }

    def _range(self, side: int) -> tuple[int, int]:
        low, high = round(self.smallest * side), round(self.largest * side)
        return max(1, low), max(1, high)

    def _resampling(self, images: Tensor, dim: int, share: Tensor, place: Tensor) -> Tensor:
        side = images.shape[dim]
        low, high = self._range(side)
        sizes = low + (share * (high - low + 1)).long().clamp(max=high - low)
        room = high - sizes
        offsets = (place * (room + 1)).long().minimum(room)
        return resampling(side, high, sizes, offsets, images.dtype, self.interpolation)


def resampling(
    side: int,
    frame: int,
    sizes: Int[Tensor, " b"],
    offsets: Int[Tensor, " b"],
    dtype: torch.dtype = torch.float32,
    interpolation: Interpolation = "nearest",
) -> Float[Tensor, "b frame side"]:
    """Matrices that resize a line of `side` pixels to `sizes` and put it at `offsets` in a line of `frame`.

    As matrices, different sizes make one batch and gradients are exact; the rules of the two interpolations are
    those of `torch.nn.functional.interpolate`.
    """
    place = torch.arange(frame, device=sizes.device) - offsets[:, None]
    inside = (place >= 0) & (place < sizes[:, None])
    source = torch.arange(side, device=sizes.device)
    if interpolation == "nearest":
        nearest = (place * side).div(sizes[:, None], rounding_mode="floor")
        weights = (nearest[..., None] == source).to(dtype)
    else:
        centre = ((place + 0.5) * side / sizes[:, None] - 0.5).clamp(0, side - 1)
        weights = (1 - (centre[..., None] - source).abs()).clamp(min=0).to(dtype)
    return weights * inside[..., None]
