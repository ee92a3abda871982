"""Data-specific discretisation (Chen, Wu, Liang & Jha, 2019): each pixel one of k colours of the data."""

from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.baselines.fitting import sample
from menet.chunks import in_chunks
from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed

IMAGES_TO_FIT = 1000
PIXELS_TO_FIT = 50_000
# Of `blended_colours`; found by what attacks it serves best, on CIFAR-10 with 50 colours.
NEAREST = 8
SOFTNESS = 0.1
SLOPE = 0.1


def nearest_colours(images: Float[Tensor, "b c h w"], codebook: Float[Tensor, "k c"]) -> Float[Tensor, "b c h w"]:
    """Each pixel replaced by the nearest colour of `codebook`; its derivative is zero wherever it exists."""
    colours = codebook.to(images.dtype)
    pixels = images.detach().movedim(1, -1)
    return colours[_nearest(pixels, colours, 1)].squeeze(-2).movedim(-1, 1) + 0 * images


def blended_colours(images: Float[Tensor, "b c h w"], codebook: Float[Tensor, "k c"]) -> Float[Tensor, "b c h w"]:
    """`nearest_colours` with a derivative that is not zero: a few near colours, weighed by how near they are.

    Weights are a softmax of minus the squared distances, in units of a share of the squared distance between a
    colour and its next. A part of the identity lets pixels move that are far from changing their colour.
    """
    colours = codebook.to(images.dtype)
    pixels = images.movedim(1, -1)
    near = colours[_nearest(pixels.detach(), colours, min(NEAREST, len(colours)))]
    apart = torch.cdist(colours, colours).fill_diagonal_(1).amin(1).square().mean().clamp(min=1e-6)
    closeness = -(pixels[..., None, :] - near).square().sum(-1) / (SOFTNESS * apart)
    blend = (closeness.softmax(-1)[..., None] * near).sum(-2)
    return torch.lerp(blend, pixels, SLOPE).movedim(-1, 1)


def learn_colours(
    images: Float[Tensor, "n c h w"], colours: int, generator: torch.Generator
) -> Float[Tensor, "k c"]:
    """The centres of k-means (scikit-learn's) over the pixels of `images`, at most 50,000 of them."""
    from sklearn.cluster import KMeans

    pixels = images.movedim(1, -1).flatten(0, 2)
    chosen = torch.randperm(len(pixels), generator=generator)[:PIXELS_TO_FIT]
    pixels = pixels[chosen.to(pixels.device)].double().cpu()
    different = len(pixels.unique(dim=0))
    if different < colours:
        raise ConfigurationError(f"colours is {colours}; the images have only {different} different ones")
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    centres = KMeans(colours, n_init=1, random_state=seed).fit(pixels.numpy()).cluster_centers_
    return torch.from_numpy(centres).to(images.dtype).clamp(0, 1)


class Discretise(Preprocessed):
    """`classifier` behind `nearest_colours` of a codebook that `fit` learns; training calls it before it begins.

    The authors choose k-medoids or density peaks and k = 2 on MNIST, up to 300 on CIFAR-10; here it is k-means.
    The codebook is a buffer, so checkpoints carry it. `gradient="exact"` is zero, `bpda` that of
    `blended_colours`: the identity does not know which pixels are about to change their colour.
    """

    name: ClassVar[str] = "discretise"
    codebook: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        colours: int = 50,
        channels: int = 3,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        for name, value in (("colours", colours), ("channels", channels)):
            if not 1 <= value <= 65_536:
                raise ConfigurationError(f"{name} is {value}; accepted are whole numbers from 1 to 65536")
        self.colours = colours
        self.register_buffer("codebook", torch.full((colours, channels), torch.nan))

    def fit(self, images: Any, generator: torch.Generator) -> Self:
        """Learn the codebook from images, as tensors on [0, 1] or bytes; their channels become the module's."""
        learned = learn_colours(sample(images, IMAGES_TO_FIT, generator), self.colours, generator)
        self.codebook = learned.to(self.codebook)
        return self

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        return nearest_colours(images, self._colours_for(images))

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return blended_colours(images, self._colours_for(images))

    def settings(self) -> dict[str, Any]:
        return {"colours": self.colours, "channels": self.codebook.shape[1], "gradient": self.gradient}

    def _colours_for(self, images: Tensor) -> Tensor:
        if bool(self.codebook[0, 0].isnan()):
            raise ConfigurationError("this discretisation has no colours yet; call fit(images, generator) first")
        if images.shape[1] != self.codebook.shape[1]:
            raise ConfigurationError(
                f"images have {images.shape[1]} channels; the colours were learned with {self.codebook.shape[1]}"
            )
        return self.codebook


def _nearest(
    pixels: Float[Tensor, "b h w c"], colours: Float[Tensor, "k c"], count: int
) -> Int[Tensor, "b h w count"]:
    """The numbers of the `count` nearest colours of each pixel."""

    def look_up(pixels: Tensor) -> tuple[Tensor, ...]:
        # ‖pixel‖² is the same for all colours, so the nearest is where ‖colour‖² − 2·pixel·colour is least.
        distance = torch.addmm(colours.square().sum(1), pixels, colours.mT, alpha=-2)
        if count == 1:
            return (distance.argmin(1, keepdim=True),)
        return (distance.topk(count, largest=False).indices,)

    (found,) = in_chunks(look_up, [pixels.flatten(0, 2).contiguous()], elements=2**16)
    return found.unflatten(0, pixels.shape[:-1])
