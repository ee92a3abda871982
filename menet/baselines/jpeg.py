"""JPEG compression (Dziugaite, Ghahramani & Roy, 2016; Guo et al., 2018), batched and on any device.

Only the lossy steps are computed: luma and chroma, chroma at half the resolution, 8×8 cosine transforms, rounding
to the tables of the quality, and back. Written by hand because codecs take one image at a time, on the CPU; the
tests compare it with Pillow.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad

from menet.errors import ConfigurationError
from menet.linalg import cosine_transform, no_autocast
from menet.preprocessed import Gradient, Preprocessed

# Annex K of ITU-T T.81, in rows of eight.
LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
# JFIF: luma and two chroma differences of red, green and blue.
TO_CHROMA = (
    (0.299, 0.587, 0.114),
    (-0.168735892, -0.331264108, 0.5),
    (0.5, -0.418687589, -0.081312411),
)

# Of smooth rounding at integers: the value for which attacks succeed most often, on CIFAR-10 and digits.
SLOPE = 0.2
Rounding = Callable[[Tensor], Tensor]


@no_autocast
def jpeg(
    images: Float[Tensor, "b c h w"], quality: int = 75, subsampling: bool = True
) -> Float[Tensor, "b c h w"]:
    """Images of one or three channels after JPEG compression at `quality` from 1 to 100.

    `subsampling` halves the resolution of chroma, as encoders do by default. Pixels are rounded to bytes before
    and after, so the derivative is zero wherever it exists, and that is what autograd returns.
    """
    return _encode_and_decode(images, quality, subsampling, torch.round, torch.round).clamp(0, 1)


@no_autocast
def smooth_jpeg(
    images: Float[Tensor, "b c h w"], quality: int = 75, subsampling: bool = True
) -> Float[Tensor, "b c h w"]:
    """A smooth version of `jpeg`, for BPDA: coefficients are rounded smoothly, bytes not at all.

    Smooth rounding of t to the integer n gives n + s·(t − n) + (1 − s)·(t − n)³. The cube is Shin & Song's
    (2017): its slope is largest where a coefficient is about to jump. The slope s lets all others move too.
    """
    return _encode_and_decode(images, quality, subsampling, lambda pixels: pixels, _round_smoothly)


def table(base: tuple[tuple[int, ...], ...], quality: int, like: Tensor) -> Float[Tensor, "8 8"]:
    """The quantization table for a quality, by the rule of libjpeg that all common encoders share."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    whole = (torch.tensor(base, device=like.device) * scale + 50) // 100
    return whole.clamp(1, 255).to(like.dtype)


class JPEG(Preprocessed):
    """Classify JPEG-compressed images; Guo et al. use quality 75.

    `gradient="exact"` is zero. `bpda` uses `smooth_jpeg`: with the identity the defense would look far more
    robust than it is, because most small perturbations are rounded away.
    """

    name: ClassVar[str] = "jpeg"

    def __init__(
        self,
        classifier: nn.Module,
        quality: int = 75,
        subsampling: bool = True,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 1 <= quality <= 100:
            raise ConfigurationError(f"expected quality from 1 to 100, got {quality}")
        self.quality, self.subsampling = quality, subsampling

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return jpeg(images, self.quality, self.subsampling)

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return smooth_jpeg(images, self.quality, self.subsampling)

    def settings(self) -> dict[str, Any]:
        return {"quality": self.quality, "subsampling": self.subsampling, "gradient": self.gradient}


def _encode_and_decode(
    images: Tensor, quality: int, subsampling: bool, to_bytes: Rounding, to_integer: Rounding
) -> Float[Tensor, "b c h w"]:
    """Encode and decode, without clipping; `to_bytes` rounds pixels, `to_integer` coefficients."""
    channels, height, width = images.shape[1:]
    if channels not in (1, 3):
        raise ConfigurationError(f"expected images of 1 or 3 channels for JPEG, got {channels}")
    pixels = to_bytes(images * 255)
    if channels == 1:
        return to_bytes(_quantize(pixels - 128, table(LUMA, quality, images), to_integer) + 128) / 255
    to_chroma = torch.tensor(TO_CHROMA, dtype=images.dtype, device=images.device)
    luma, chroma = to_bytes(torch.einsum("dc,bchw->bdhw", to_chroma, pixels)).split([1, 2], 1)
    luma = _quantize(luma - 128, table(LUMA, quality, images), to_integer) + 128
    tables = table(CHROMA, quality, images)
    if subsampling:
        even = pad(chroma, (0, width % 2, 0, height % 2), mode="replicate")
        halved = _quantize(to_bytes(avg_pool2d(even, 2)), tables, to_integer)
        chroma = _upsample(halved)[..., :height, :width]
    else:
        chroma = _quantize(chroma, tables, to_integer)
    decoded = torch.einsum("cd,bdhw->bchw", to_chroma.inverse(), to_bytes(torch.cat([luma, chroma], 1)))
    return to_bytes(decoded) / 255


def _round_smoothly(t: Tensor) -> Tensor:
    whole = t.detach().round()
    rest = t - whole
    return whole + SLOPE * rest + (1 - SLOPE) * rest**3


def _quantize(planes: Tensor, divisors: Tensor, to_integer: Rounding) -> Tensor:
    """Transform 8×8 blocks, round to multiples of `divisors`, and transform back."""
    height, width = planes.shape[-2:]
    whole = pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate") if planes.numel() else planes
    blocks = whole.unflatten(-2, (-1, 8)).unflatten(-1, (-1, 8)).transpose(-3, -2)
    basis = cosine_transform(8).to(planes)
    coefficients = to_integer((basis @ blocks @ basis.mT) / divisors) * divisors
    back = (basis.mT @ coefficients @ basis).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return back[..., :height, :width]


def _upsample(planes: Tensor) -> Tensor:
    """Double the resolution: ¾ of the nearest old pixel and ¼ of the next, as decoders do."""
    for dim in (-2, -1):
        size = planes.shape[dim]
        before, after = planes.narrow(dim, 0, 1), planes.narrow(dim, size - 1, 1)
        earlier = torch.cat([before, planes.narrow(dim, 0, size - 1)], dim)
        later = torch.cat([planes.narrow(dim, 1, size - 1), after], dim)
        pairs = torch.stack([0.75 * planes + 0.25 * earlier, 0.75 * planes + 0.25 * later], dim)
        planes = pairs.flatten(dim - 1, dim)
    return planes
