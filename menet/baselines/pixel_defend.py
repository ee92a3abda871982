"""PixelDefend (Song, Kim, Nowozin, Ermon & Kushman, 2018): move an image to a more likely one nearby."""

from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.baselines.discretize import sample_images
from menet.baselines.pixel_cnn import PixelCNN, Raster, train_pixel_cnn
from menet.errors import ConfigurationError
from menet.linalg import no_autocast
from menet.preprocessed import Gradient, Preprocessed

IMAGES_TO_FIT = 20_000
# In levels: images are bytes over 255, whose products with 255 are integers only up to rounding.
ROUNDING = 1e-3


@torch.no_grad()
@no_autocast
def purify(network: PixelCNN, images: Float[Tensor, "b c h w"], epsilon: float) -> Float[Tensor, "b c h w"]:
    """Replace each value in turn by the most likely level within `epsilon` of it, given those replaced before.

    Where no level lies within `epsilon` the value stays. The batch is processed together, in c·h·w sequential
    steps.
    """
    most = network.levels - 1
    low = ((images - epsilon) * most - ROUNDING).ceil().clamp(min=0)
    high = ((images + epsilon) * most + ROUNDING).floor().clamp(max=most)
    levels = torch.arange(network.levels, device=images.device, dtype=images.dtype)
    purified, raster = images.clone(), Raster(network, images)
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
    authors purify within 16/255 on CIFAR-10, about 0.3 on MNIST-like images. `width`, `layers` and `levels` are
    those of the PixelCNN and `steps` of its training; its weights are part of `state_dict`, and frozen while the
    classifier is trained. `gradient="exact"` is zero, as the choice of levels jumps; `bpda` uses the identity.
    """

    name: ClassVar[str] = "pixel-defend"
    fitted: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        epsilon: float = 16 / 255,
        channels: int = 3,
        levels: int = 256,
        width: int = 32,
        layers: int = 4,
        steps: int = 500,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 0 <= epsilon <= 1:
            raise ConfigurationError(f"expected epsilon in [0, 1], got {epsilon}")
        if steps < 1:
            raise ConfigurationError(f"expected steps >= 1, got {steps}")
        self.epsilon, self.steps = epsilon, steps
        self.pixel_cnn = PixelCNN(channels, levels, width, layers).requires_grad_(False)
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, images: Any, generator: torch.Generator) -> Self:
        """Train the PixelCNN on images, as tensors on [0, 1] or bytes, and adopt their number of channels."""
        chosen = sample_images(images, IMAGES_TO_FIT, generator)
        network = PixelCNN(**{**self.pixel_cnn.settings(), "channels": chosen.shape[1]}).to(self.fitted.device)
        train_pixel_cnn(network, chosen.float(), generator, self.steps)
        self.pixel_cnn = network.requires_grad_(False)
        self.fitted.fill_(True)
        return self

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
        return {
            "epsilon": self.epsilon,
            **self.pixel_cnn.settings(),
            "steps": self.steps,
            "gradient": self.gradient,
        }
