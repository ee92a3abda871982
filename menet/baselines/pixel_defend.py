"""PixelDefend (Song, Kim, Nowozin, Ermon & Kushman, 2018): move an image to a more likely one nearby."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.baselines.feature_squeezing import sample_images
from menet.baselines.pixel_cnn import PixelCNN, train_pixel_cnn, train_pixel_cnn_plus
from menet.baselines.pixel_cnn_plus import PixelCNNPlusPlus
from menet.errors import ConfigurationError
from menet.linalg import no_autocast
from menet.preprocessed import Gradient, Preprocessed

IMAGES_TO_FIT = 20_000
"""For the small PixelCNN; PixelCNN++ learns from all."""
# In levels: images are bytes over 255, whose products with 255 are integers only up to rounding.
ROUNDING = 1e-3

LikelihoodName = Literal["pixel-cnn", "pixel-cnn++"]


@torch.no_grad()
@no_autocast
def purify(
    network: PixelCNN | PixelCNNPlusPlus, images: Float[Tensor, "b c h w"], epsilon: float
) -> Float[Tensor, "b c h w"]:
    """Replace each value in turn by the most likely level within `epsilon` of it, given those replaced before.

    Where no level lies within `epsilon` the value stays. The batch is processed together, in c·h·w sequential
    steps.
    """
    most = network.levels - 1
    low = ((images - epsilon) * most - ROUNDING).ceil().clamp(min=0)
    high = ((images + epsilon) * most + ROUNDING).floor().clamp(max=most)
    levels = torch.arange(network.levels, device=images.device, dtype=images.dtype)
    purified, raster = images.clone(), network.raster(images)
    for row in range(images.shape[2]):
        for column in range(images.shape[3]):
            at = (..., row, column)
            within = (levels >= low[at][..., None]) & (levels <= high[at][..., None])
            some = within.any(-1)
            for channel in range(images.shape[1]):
                logits = raster.logits_at(row, column, channel)
                most_likely = logits.masked_fill(~within[:, channel], -torch.inf).argmax(-1) / most
                values = torch.where(
                    some[:, channel], most_likely.to(images.dtype), images[:, channel, row, column]
                )
                raster.write(row, column, channel, values)
                purified[:, channel, row, column] = values
    return purified


class PixelDefend(Preprocessed):
    """Classify images purified by a PixelCNN that `fit` trains; training calls it before the first epoch.

    As in the original, the classifier is trained on unpurified images: in training mode they pass unchanged. The
    authors purify within 16/255 on CIFAR-10, about 0.3 on MNIST-like images. `likelihood` is a small `pixel-cnn`
    or the published size of network, `pixel-cnn++`, which is trained for at most `steps` until its held-out
    likelihood has not improved for `patience` passes; `width`, `layers`, `levels` and `mixtures` are its own. Its
    weights are part of `state_dict`, and frozen while the classifier is trained; `held_out_bits` are its bits per
    dimension on held-out images, None for the small one. `gradient="exact"` is zero, as the choice of levels
    jumps; `bpda` uses the identity.
    """

    name: ClassVar[str] = "pixel-defend"
    fitted: Tensor
    held_out_bits: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        epsilon: float = 16 / 255,
        channels: int = 3,
        levels: int = 256,
        width: int = 32,
        layers: int = 4,
        steps: int = 500,
        likelihood: str = "pixel-cnn",
        mixtures: int = 10,
        patience: int = 10,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 0 <= epsilon <= 1:
            raise ConfigurationError(f"expected epsilon in [0, 1], got {epsilon}")
        if steps < 1:
            raise ConfigurationError(f"expected steps >= 1, got {steps}")
        if likelihood not in get_args(LikelihoodName):
            names = ", ".join(get_args(LikelihoodName))
            raise ConfigurationError(f"unknown likelihood {likelihood!r}; choose from {names}")
        self.epsilon, self.steps, self.patience = epsilon, steps, patience
        self.likelihood, self.mixtures = likelihood, mixtures
        self.pixel_cnn = self._network(channels=channels, levels=levels, width=width, layers=layers)
        self.register_buffer("fitted", torch.tensor(False))
        self.register_buffer("held_out_bits", torch.tensor(0.0) if likelihood == "pixel-cnn++" else None)

    def fit(self, images: Any, generator: torch.Generator, checkpoint: Path | None = None) -> Self:
        """Train the network of likelihoods on images, as tensors on [0, 1] or bytes, and adopt their channels.

        An interrupted training of PixelCNN++ resumes from `checkpoint`, if given.
        """
        plus = self.likelihood == "pixel-cnn++"
        chosen = sample_images(images, len(images) if plus else IMAGES_TO_FIT, generator).float()
        network = self._network(**{**self.pixel_cnn.settings(), "channels": chosen.shape[1]})
        network.requires_grad_(True).to(self.fitted.device)
        if isinstance(network, PixelCNNPlusPlus):
            bits = train_pixel_cnn_plus(
                network, chosen, generator, self.steps, self.patience, checkpoint=checkpoint
            )
            self.held_out_bits.fill_(bits)
            print(f"PixelCNN++: {bits:.3f} bits per dimension on held-out images")
        else:
            train_pixel_cnn(network, chosen, generator, self.steps)
        self.pixel_cnn = network.requires_grad_(False)
        self.fitted.fill_(True)
        return self

    def _network(self, **settings: Any) -> PixelCNN | PixelCNNPlusPlus:
        if self.likelihood == "pixel-cnn":
            return PixelCNN(**settings).requires_grad_(False)
        return PixelCNNPlusPlus(**{**settings, "mixtures": self.mixtures}).requires_grad_(False)

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        if not bool(self.fitted):
            raise ConfigurationError("the PixelCNN has not been trained; call fit(images, generator) first")
        if images.shape[1] != self.pixel_cnn.channels:
            raise ConfigurationError(
                f"expected images of {self.pixel_cnn.channels} channels, as in fit, got {images.shape[1]}"
            )
        if self.training:
            return images
        return purify(self.pixel_cnn, images.detach(), self.epsilon) + 0 * images

    def settings(self) -> dict[str, Any]:
        plus = {"likelihood": self.likelihood, "mixtures": self.mixtures, "patience": self.patience}
        return {
            "epsilon": self.epsilon,
            **self.pixel_cnn.settings(),
            "steps": self.steps,
            **(plus if self.likelihood == "pixel-cnn++" else {}),
            "gradient": self.gradient,
        }
