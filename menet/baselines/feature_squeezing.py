"""Fewer values for a perturbation to hide in: a few colors of the data, thermometer codes, and feature squeezing.

Feature squeezing (Xu, Evans & Qi, 2018) is fewer values per channel (`BitDepth`) or the median of a window
(`MedianSmoothing`).
"""

from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.errors import ConfigurationError, require
from menet.linalg import in_chunks, no_autocast
from menet.preprocessed import Gradient, Preprocessed

IMAGES_TO_FIT = 1000
PIXELS_TO_FIT = 50_000
# Of `blended_colors`: the values for which attacks succeed most often, on CIFAR-10 with 50 colors.
NEAREST = 8
SOFTNESS = 0.1
SLOPE = 0.1


@no_autocast
def nearest_colors(images: Float[Tensor, "b c h w"], codebook: Float[Tensor, "k c"]) -> Float[Tensor, "b c h w"]:
    """Replace each pixel by the nearest color of `codebook`; the derivative is zero wherever it exists."""
    colors = codebook.to(images.dtype)
    pixels = images.detach().movedim(1, -1)
    return colors[_nearest(pixels, colors, 1)].squeeze(-2).movedim(-1, 1) + 0 * images


@no_autocast
def blended_colors(images: Float[Tensor, "b c h w"], codebook: Float[Tensor, "k c"]) -> Float[Tensor, "b c h w"]:
    """A smooth version of `nearest_colors`, for BPDA: the mean of a few near colors, weighted by their distance.

    Weights are a softmax of minus the squared distances, in units of a fraction of the squared distance between a
    color and its nearest neighbor. A small multiple of the identity lets pixels move that are far from changing
    their color.
    """
    colors = codebook.to(images.dtype)
    pixels = images.movedim(1, -1)
    near = colors[_nearest(pixels.detach(), colors, min(NEAREST, len(colors)))]
    apart = torch.cdist(colors, colors).fill_diagonal_(1).amin(1).square().mean().clamp(min=1e-6)
    closeness = -(pixels[..., None, :] - near).square().sum(-1) / (SOFTNESS * apart)
    blend = (closeness.softmax(-1)[..., None] * near).sum(-2)
    return torch.lerp(blend, pixels, SLOPE).movedim(-1, 1)


def learn_colors(
    images: Float[Tensor, "n c h w"], colors: int, generator: torch.Generator
) -> Float[Tensor, "k c"]:
    """The centers of k-means (scikit-learn's) over the pixels of `images`, at most 50,000 of them."""
    cluster = require("sklearn.cluster", extra="demo")
    pixels = images.movedim(1, -1).flatten(0, 2)
    chosen = torch.randperm(len(pixels), generator=generator)[:PIXELS_TO_FIT]
    pixels = pixels[chosen.to(pixels.device)].double().cpu()
    distinct = len(pixels.unique(dim=0))
    if distinct < colors:
        raise ConfigurationError(f"expected images of at least {colors} distinct colors, got {distinct}")
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    centers = cluster.KMeans(colors, n_init=1, random_state=seed).fit(pixels.numpy()).cluster_centers_
    return torch.from_numpy(centers).to(images.dtype).clamp(0, 1)


def sample_images(images: Any, count: int, generator: torch.Generator) -> Float[Tensor, "n c h w"]:
    """Draw at most `count` of `images` without replacement, on [0, 1].

    `images` is a float tensor on [0, 1], or bytes as datasets hold them: a tensor, or anything that has a length
    and returns a tensor for an index tensor.
    """
    if not len(images):
        raise ConfigurationError("expected at least one image, got none")
    chosen = torch.randperm(len(images), generator=generator)[:count].sort().values
    picked: Tensor = images[chosen.to(images.device) if isinstance(images, Tensor) else chosen]
    if picked.ndim != 4:
        raise ConfigurationError(f"expected images of shape (n, c, h, w), got {tuple(picked.shape)}")
    return picked / 255 if picked.dtype == torch.uint8 else picked


class Discretize(Preprocessed):
    """Classify images in the colors of a codebook that `fit` learns (Chen, Wu, Liang & Jha, 2019).

    Training calls `fit` before the first epoch. The authors choose k-medoids or density peaks and k = 2 on MNIST,
    up to 300 on CIFAR-10; here it is k-means. The codebook is a buffer, so checkpoints contain it.
    `gradient="exact"` is zero, `bpda` that of `blended_colors`: the identity would ignore which pixels are about
    to change their color.
    """

    name: ClassVar[str] = "discretize"
    codebook: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        colors: int = 50,
        channels: int = 3,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        for name, value in (("colors", colors), ("channels", channels)):
            if not 1 <= value <= 65_536:
                raise ConfigurationError(f"expected {name} from 1 to 65536, got {value}")
        self.colors = colors
        self.register_buffer("codebook", torch.full((colors, channels), torch.nan))

    def fit(self, images: Any, generator: torch.Generator) -> Self:
        """Learn the codebook from images, as tensors on [0, 1] or bytes, and adopt their number of channels."""
        learned = learn_colors(sample_images(images, IMAGES_TO_FIT, generator), self.colors, generator)
        self.codebook = learned.to(self.codebook)
        return self

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return nearest_colors(images, self._codebook_for(images))

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return blended_colors(images, self._codebook_for(images))

    def settings(self) -> dict[str, Any]:
        return {"colors": self.colors, "channels": self.codebook.shape[1], "gradient": self.gradient}

    def _codebook_for(self, images: Tensor) -> Tensor:
        if bool(self.codebook[0, 0].isnan()):
            raise ConfigurationError("the codebook has not been learned; call fit(images, generator) first")
        if images.shape[1] != self.codebook.shape[1]:
            raise ConfigurationError(
                f"expected images of {self.codebook.shape[1]} channels, as in fit, got {images.shape[1]}"
            )
        return self.codebook


def _nearest(
    pixels: Float[Tensor, "b h w c"], colors: Float[Tensor, "k c"], count: int
) -> Int[Tensor, "b h w count"]:
    """The indices of the `count` nearest colors of each pixel."""

    def look_up(pixels: Tensor) -> tuple[Tensor, ...]:
        # ‖pixel‖² is the same for all colors, so the nearest minimizes ‖color‖² − 2·pixel·color.
        distance = torch.addmm(colors.square().sum(1), pixels, colors.mT, alpha=-2)
        if count == 1:
            return (distance.argmin(1, keepdim=True),)
        return (distance.topk(count, largest=False).indices,)

    (found,) = in_chunks(look_up, [pixels.flatten(0, 2).contiguous()], elements=2**16)
    return found.unflatten(0, pixels.shape[:-1])


def thermometer(images: Float[Tensor, "b c h w"], levels: int = 16) -> Float[Tensor, "b codes h w"]:
    """Codes τ(x)ₗ = 1 where x > l/levels, else 0, for l from 0 to levels − 1: `levels` channels for each.

    The derivative is zero wherever it exists, and that is what autograd returns.
    """
    return _above(images, levels).clamp(0, 1).ceil().flatten(1, 2)


def ramp(images: Float[Tensor, "b c h w"], levels: int = 16, width: float = 1.0) -> Float[Tensor, "b codes h w"]:
    """The differentiable substitute of BPDA: min(max((x − l/levels)/width, 0), 1).

    Width 1 is the substitute of Athalye, Carlini & Wagner (2018), whose ceiling is the code. With width 1/levels
    only the level that contains the pixel has a gradient.
    """
    return (_above(images, levels) / width).clamp(0, 1).flatten(1, 2)


class Thermometer(Preprocessed):
    """Classify thermometer codes of pixels (Buckman, Roy, Raffel & Goodfellow, 2018).

    The classifier has `levels` input channels per image channel. It sees codes, not pixels, so it must not
    normalize them; `models.build` does not when the number of channels differs from that of the dataset. `width`
    is that of the `ramp` used by `bpda`. `gradient="exact"` is zero: the codes are step functions.
    """

    name: ClassVar[str] = "thermometer"

    def __init__(
        self,
        classifier: nn.Module,
        levels: int = 16,
        width: float = 1.0,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if levels < 1:
            raise ConfigurationError(f"expected levels >= 1, got {levels}")
        if not 0 < width <= 1:
            raise ConfigurationError(f"expected width in (0, 1], got {width}")
        self.levels, self.width = levels, width

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        return thermometer(images, self.levels)

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Tensor:
        return ramp(images, self.levels, self.width)

    def visible(self, seen: Tensor) -> Float[Tensor, "b c h w"]:
        """Codes decoded to pixels: the mean over levels."""
        return seen.unflatten(1, (-1, self.levels)).mean(2)

    @classmethod
    def classifier_channels(cls, channels: int, settings: dict[str, Any]) -> int:
        levels: int = settings.get("levels", 16)
        return channels * levels

    def settings(self) -> dict[str, Any]:
        return {"levels": self.levels, "width": self.width, "gradient": self.gradient}


def _above(images: Tensor, levels: int) -> Tensor:
    thresholds = torch.arange(levels, dtype=images.dtype, device=images.device) / levels
    return images[:, :, None] - thresholds[:, None, None]


def reduce_depth(images: Float[Tensor, "*shape"], bits: int = 5) -> Float[Tensor, "*shape"]:
    """Round to the nearest of 2^bits evenly spaced values; the derivative is zero wherever it exists."""
    steps = 2**bits - 1
    return (images * steps).round() / steps


class BitDepth(Preprocessed):
    """Classify images of reduced bit depth (`reduce_depth`). The authors use 1 bit on MNIST and 5 on CIFAR-10.

    `gradient="exact"` is zero: rounding is piecewise constant. `bpda` uses the identity.
    """

    name: ClassVar[str] = "bit-depth"

    def __init__(self, classifier: nn.Module, bits: int = 5, gradient: Gradient = "bpda", seed: int = 0) -> None:
        super().__init__(classifier, gradient, seed)
        if not 1 <= bits <= 16:
            raise ConfigurationError(f"expected bits from 1 to 16, got {bits}")
        self.bits = bits

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return reduce_depth(images, self.bits)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "gradient": self.gradient}


def median_smooth(images: Float[Tensor, "b c h w"], size: int = 2) -> Float[Tensor, "b c h w"]:
    """The median over size×size windows of each channel, with reflected borders, as in `scipy.ndimage`.

    For an even number of values it is the upper of the two in the middle. Differentiable almost everywhere: the
    gradient goes to the pixel that is the median.
    """
    before, after = size // 2, (size - 1) // 2
    for dim in (-2, -1):
        images = images.index_select(dim, _reflected(images.shape[dim], before, after, images.device))
    windows = images.unfold(-2, size, 1).unfold(-2, size, 1).flatten(-2)
    return windows.sort(-1).values[..., size * size // 2]


class MedianSmoothing(Preprocessed):
    """Classify median-filtered images (`median_smooth`); the authors' window is 2×2, on MNIST also 3×3.

    `gradient="exact"`, the default, passes to the pixels that are medians. `bpda` uses the identity and is
    weaker, because it ignores which pixels matter.
    """

    name: ClassVar[str] = "median"

    def __init__(self, classifier: nn.Module, size: int = 2, gradient: Gradient = "exact", seed: int = 0) -> None:
        super().__init__(classifier, gradient, seed)
        if size < 1:
            raise ConfigurationError(f"expected size >= 1, got {size}")
        self.size = size

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return median_smooth(images, self.size)

    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "gradient": self.gradient}


def _reflected(length: int, before: int, after: int, device: torch.device) -> Tensor:
    """Indices that extend a line by its reflection, the end itself included: … 1 0 | 0 1 2 … ."""
    index = torch.arange(-before, length + after, device=device) % (2 * length)
    return torch.minimum(index, 2 * length - 1 - index)
