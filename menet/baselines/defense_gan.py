"""Defense-GAN (Samangouei, Kabkab & Chellappa, 2018): classify the nearest image that a generator can produce."""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.baselines.discretize import sample_images
from menet.baselines.wgan import Generator, train_wgan
from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed

IMAGES_TO_FIT = 60_000
MOMENTUM = 0.7
LAST_PART, LAST_RATE = 0.8, 0.1
"""As the authors' code: from 80 % of the steps on, a tenth of the learning rate."""
MAX_BATCH = 2048
"""Latent vectors in one pass through the generator."""


def project(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    starts: Float[Tensor, "b r latent"],
    steps: int,
    learning_rate: float = 10.0,
) -> Float[Tensor, "b latent"]:
    """The latent vector whose image is nearest to each of `images`, by gradient descent from r starts each.

    The loss is the mean of the squared differences over the pixels. All images and starts are one batch, in
    chunks of bounded size. Where a step is not finite, the vector stays; a start with a loss of NaN is never
    chosen. If gradients are enabled and `images` require them, they pass through all the steps, which keeps the
    graph of every step in memory.
    """
    if steps < 1:
        raise ConfigurationError(f"expected steps >= 1, got {steps}")
    if not len(images):
        return starts[:, 0]
    unrolled = torch.is_grad_enabled() and images.requires_grad
    size = max(1, MAX_BATCH // starts.shape[1])
    with torch.inference_mode(False), torch.enable_grad():
        found = [
            _descend(network, some if unrolled else some.detach().clone(), near, steps, learning_rate, unrolled)
            for some, near in zip(images.split(size), starts.split(size), strict=True)
        ]
    return torch.cat(found)


def _descend(
    network: nn.Module, images: Tensor, starts: Tensor, steps: int, learning_rate: float, unrolled: bool
) -> Tensor:
    count = starts.shape[1]
    goal = images.repeat_interleave(count, 0)
    latents = starts.detach().clone().flatten(0, 1).requires_grad_()
    momentum = torch.zeros_like(latents)
    for step in range(steps):
        rate = learning_rate if step < LAST_PART * steps else LAST_RATE * learning_rate
        loss = _losses(network, latents, goal).sum()
        (slope,) = torch.autograd.grad(loss, latents, create_graph=unrolled)
        momentum = MOMENTUM * momentum + slope
        moved = latents - rate * momentum
        latents = torch.where(moved.isfinite(), moved, latents.detach())
        if not unrolled:
            latents, momentum = latents.detach().requires_grad_(), momentum.detach()
    with torch.no_grad():
        losses = _losses(network, latents, goal).nan_to_num(nan=torch.inf).view(-1, count)
    best = losses.argmin(1)
    chosen = latents.unflatten(0, (-1, count))[torch.arange(len(best), device=best.device), best]
    return chosen if unrolled else chosen.detach()


def _losses(network: nn.Module, latents: Tensor, goal: Tensor) -> Tensor:
    losses: Tensor = (network(latents) - goal).square().flatten(1).mean(1)
    return losses


class DefenseGAN(Preprocessed):
    """Classify the projection of each image onto the range of a generator that `fit` trains on clean images.

    The projection takes `steps` gradient steps (the authors' L, 200) from each of `starts` random latent vectors
    (their R, 10) and keeps the best. As in the authors' first variant, the classifier is trained on the images
    themselves: in training mode they pass unchanged, unless `train_on_projections` (their second).
    `latent`, `features` and `gan_steps` are those of the generator and of its training; the authors' are 128, 64
    and 200,000. Its weights are part of `state_dict`, and frozen while the classifier is trained.

    `gradient="exact"` differentiates the unrolled steps, with memory proportional to steps × starts; `bpda` uses
    the identity.
    """

    name: ClassVar[str] = "defense-gan"
    fitted: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        steps: int = 200,
        starts: int = 10,
        learning_rate: float = 10.0,
        channels: int = 3,
        height: int = 32,
        width: int = 32,
        latent: int = 64,
        features: int = 16,
        gan_steps: int = 2000,
        train_on_projections: bool = False,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        for name, value in (("steps", steps), ("starts", starts), ("gan_steps", gan_steps)):
            if value < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {value}")
        if not learning_rate > 0:
            raise ConfigurationError(f"expected learning_rate > 0, got {learning_rate}")
        self.steps, self.starts, self.learning_rate, self.gan_steps = steps, starts, learning_rate, gan_steps
        self.train_on_projections = train_on_projections
        self.gan = Generator(channels, height, width, latent, features).requires_grad_(False)
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, images: Any, generator: torch.Generator, checkpoint: Path | None = None) -> Self:
        """Train the generator on images, as tensors on [0, 1] or bytes, and adopt their shape.

        An interrupted training resumes from `checkpoint`, if given.
        """
        chosen = sample_images(images, IMAGES_TO_FIT, generator)
        channels, height, width = chosen.shape[1:]
        network = Generator(channels, height, width, self.gan.latent, self.gan.features).to(self.fitted.device)
        train_wgan(network, chosen.float(), generator, self.gan_steps, checkpoint=checkpoint)
        self.gan = network.requires_grad_(False)
        self.fitted.fill_(True)
        return self

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        self._check(images)
        if self.training and not self.train_on_projections:
            return images
        shape = (self.starts, self.gan.latent)
        starts = self.draw(lambda count: torch.randn(count, *shape, generator=generator), len(images))
        latents = project(self.gan, images, starts.to(images), self.steps, self.learning_rate)
        generated: Tensor = self.gan(latents)
        return generated.to(images.dtype)

    def settings(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "starts": self.starts,
            "learning_rate": self.learning_rate,
            **self.gan.settings(),
            "gan_steps": self.gan_steps,
            "train_on_projections": self.train_on_projections,
            "gradient": self.gradient,
        }

    def _check(self, images: Tensor) -> None:
        if not bool(self.fitted):
            raise ConfigurationError("the generator has not been trained; call fit(images, generator) first")
        expected = (self.gan.channels, self.gan.height, self.gan.width)
        if tuple(images.shape[1:]) != expected:
            raise ConfigurationError(
                f"expected images of shape {expected}, as the generator's, got {tuple(images.shape[1:])}"
            )
