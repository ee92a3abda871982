"""Random resizing and padding (Xie, Wang, Zhang, Ren & Yuille, 2018), and random crops (Guo et al., 2018)."""

from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import interpolate

from menet.errors import ConfigurationError
from menet.linalg import no_autocast
from menet.preprocessed import Gradient, Preprocessed

Interpolation = Literal["nearest", "bilinear"]


class ResizePad(Preprocessed):
    """Classify images that are resized at random and zero-padded at random, each image by itself.

    Sizes are relative to the side: images are resized to a side drawn uniformly from `smallest` to `largest` and
    padded to `largest`. The authors enlarge, 299 → 299…331 padded to 331, which is `smallest=1, largest=331/299`;
    the default has the same ratio but keeps the side, so any network fits. They do not retrain the network and
    use nearest-neighbor interpolation. `gradient="exact"` is exact for the sizes and offsets drawn. `bpda` uses
    the identity, or resizing to the padded size if that is larger.
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
                f"expected 0 < smallest <= largest <= 8, got smallest {smallest} and largest {largest}"
            )
        if interpolation not in get_args(Interpolation):
            raise ConfigurationError(
                f"unknown interpolation {interpolation!r}; choose from {', '.join(get_args(Interpolation))}"
            )
        self.smallest, self.largest = smallest, largest
        self.interpolation: Interpolation = interpolation

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        # One scale for both sides keeps the aspect ratio; the offsets are independent.
        drawn = self.draw(lambda count: torch.rand(count, 3, generator=generator), len(images))
        scale, *places = drawn.to(images.device).unbind(1)
        rows, columns = (
            self._resampling(images, dim, scale, place) for dim, place in zip((-2, -1), places, strict=True)
        )
        return _resample(images, rows, columns)

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

    def _resampling(self, images: Tensor, dim: int, scale: Tensor, place: Tensor) -> Tensor:
        side = images.shape[dim]
        low, high = self._range(side)
        sizes = low + (scale * (high - low + 1)).long().clamp(max=high - low)
        room = high - sizes
        offsets = (place * (room + 1)).long().minimum(room)
        return resampling(side, high, sizes, offsets, images.dtype, self.interpolation)


class Cropped(Preprocessed):
    """A preprocessing step and then, at inference, a random crop of its result, rescaled to the full size.

    Guo, Rana, Cissé & van der Maaten (2018) classify 30 crops of 90/224 of the side and average the
    probabilities: `crop=90 / 224` and `average(images, 30, of="probabilities")`. A crop of 1 is none. The crop is
    differentiated whatever `gradient` says of the preprocessing before it.
    """

    def __init__(self, classifier: nn.Module, crop: float, gradient: Gradient, seed: int | None) -> None:
        super().__init__(classifier, gradient, seed)
        if not 0 < crop <= 1:
            raise ConfigurationError(f"expected crop in (0, 1], got {crop}")
        self.crop = crop

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        return self.classifier(self.cropped(self.reconstruct(images)))

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b features"]:
        vectors: Tensor = self.classifier.features(self.cropped(self.reconstruct(images)))  # type: ignore[operator]
        return vectors

    def cropped(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Each image's own random crop, rescaled bilinearly; the images themselves in training."""
        if self.training or self.crop == 1:
            return images
        drawn = torch.rand(len(images), 2, generator=self.generator).to(images.device)
        rows, columns = (
            cropping(side, max(1, round(self.crop * side)), place, images.dtype)
            for side, place in zip(images.shape[-2:], drawn.unbind(1), strict=True)
        )
        return _resample(images, rows, columns)


def cropping(
    side: int, size: int, place: Float[Tensor, " b"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "b side side"]:
    """Matrices that rescale `size` consecutive pixels of a line of `side`, at `place` on [0, 1), to all of it."""
    offset = (place * (side - size + 1)).long().clamp(max=side - size)[:, None]
    target = torch.arange(side, device=place.device)
    center = offset + ((target + 0.5) * size / side - 0.5).clamp(0, size - 1)
    return (1 - (center[..., None] - target).abs()).clamp(min=0).to(dtype)


def resampling(
    side: int,
    frame: int,
    sizes: Int[Tensor, " b"],
    offsets: Int[Tensor, " b"],
    dtype: torch.dtype = torch.float32,
    interpolation: Interpolation = "nearest",
) -> Float[Tensor, "b frame side"]:
    """Matrices that resize a line of `side` pixels to `sizes` and pad it by `offsets` to a line of `frame`.

    With matrices, different sizes form one batch and gradients are exact; both interpolations follow
    `torch.nn.functional.interpolate`.
    """
    place = torch.arange(frame, device=sizes.device) - offsets[:, None]
    inside = (place >= 0) & (place < sizes[:, None])
    source = torch.arange(side, device=sizes.device)
    if interpolation == "nearest":
        nearest = (place * side).div(sizes[:, None], rounding_mode="floor")
        weights = (nearest[..., None] == source).to(dtype)
    else:
        center = ((place + 0.5) * side / sizes[:, None] - 0.5).clamp(0, side - 1)
        weights = (1 - (center[..., None] - source).abs()).clamp(min=0).to(dtype)
    return weights * inside[..., None]


@no_autocast
def _resample(
    images: Float[Tensor, "b c h w"], rows: Float[Tensor, "b height h"], columns: Float[Tensor, "b width w"]
) -> Float[Tensor, "b c height width"]:
    return rows[:, None] @ images @ columns[:, None].mT
