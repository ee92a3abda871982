"""A small generative adversarial network: Wasserstein with gradient penalty (Gulrajani et al., 2017).

The networks are those of the authors for MNIST: three 5×5 (transposed) convolutions of stride 2, without batch
normalization, so that an image depends on its own latent vector alone. `features` scales their width.
"""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from menet.errors import ConfigurationError
from menet.files import write_atomically
from menet.linalg import has_bfloat16
from menet.progress import reporting

KERNEL, STRIDE, LEAK = 5, 2, 0.2
DOUBLINGS = 3
CRITIC_STEPS = 5
PENALTY = 10.0
BETAS = (0.5, 0.9)
BATCH_SIZE = 64
SAVE_EVERY = 100


class Generator(nn.Module):
    """From latent vectors `(n, latent)`, drawn from a normal distribution, to images on [0, 1]."""

    def __init__(
        self, channels: int = 3, height: int = 32, width: int = 32, latent: int = 64, features: int = 16
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "height": height, "width": width, "latent": latent, "features": features}
        for name, value in sizes.items():
            if not 1 <= value <= 4096:
                raise ConfigurationError(f"expected {name} from 1 to 4096, got {value}")
        self.channels, self.height, self.width = channels, height, width
        self.latent, self.features = latent, features
        self.sizes = list(zip(halvings(height)[::-1], halvings(width)[::-1], strict=True))
        rows, columns = self.sizes[0]
        with torch.random.fork_rng(devices=[]):
            self.first = nn.Linear(latent, 4 * features * rows * columns)
            layers = [(4 * features, 2 * features), (2 * features, features), (features, channels)]
            self.layers = nn.ModuleList(
                nn.ConvTranspose2d(*pair, KERNEL, STRIDE, padding=KERNEL // 2, output_padding=1)
                for pair in layers
            )

    def forward(self, latents: Float[Tensor, "n latent"]) -> Float[Tensor, "n c h w"]:
        maps = self.first(latents).unflatten(1, (4 * self.features, *self.sizes[0]))
        for layer, (rows, columns) in zip(self.layers, self.sizes[1:], strict=True):
            maps = layer(maps.relu())[..., :rows, :columns]
        return maps.float().sigmoid() if maps.dtype == torch.bfloat16 else maps.sigmoid()

    def settings(self) -> dict[str, Any]:
        names = ("channels", "height", "width", "latent", "features")
        return {name: getattr(self, name) for name in names}


class Critic(nn.Module):
    """How real images look: a number for each, without bounds."""

    def __init__(self, channels: int, height: int, width: int, features: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            layers = [(channels, features), (features, 2 * features), (2 * features, 4 * features)]
            self.layers = nn.ModuleList(nn.Conv2d(*pair, KERNEL, STRIDE, KERNEL // 2) for pair in layers)
            self.last = nn.Linear(4 * features * halvings(height)[-1] * halvings(width)[-1], 1)

    def forward(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, " n"]:
        maps = 2 * images - 1
        for layer in self.layers:
            maps = leaky_relu(layer(maps), LEAK)
        scores: Tensor = self.last(maps.flatten(1)).squeeze(1)
        return scores.float() if scores.dtype == torch.bfloat16 else scores


def halvings(side: int) -> list[int]:
    """`side` and what is left after each halving, rounded up."""
    sides = [side]
    for _ in range(DOUBLINGS):
        sides.append(-(-sides[-1] // STRIDE))
    return sides


def reset(network: nn.Module, random: torch.Generator) -> None:
    """Initialize all layers for rectified inputs (He et al., 2015), from `random` alone."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            fan = layer.weight[0].numel()
            if isinstance(layer, nn.ConvTranspose2d):
                fan = layer.in_channels * KERNEL**2 // STRIDE**2
            weight = torch.randn(layer.weight.shape, generator=random) * math.sqrt(2 / max(1, fan))
            layer.weight.data.copy_(weight)
            if layer.bias is not None:
                layer.bias.data.zero_()


def gradient_penalty(
    critic: Critic, real: Float[Tensor, "n c h w"], fake: Float[Tensor, "n c h w"], mix: Float[Tensor, "n 1 1 1"]
) -> Float[Tensor, ""]:
    """The mean of (‖∇critic‖ − 1)² at mixtures of real and generated images."""
    between = torch.lerp(real, fake, mix).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def train_wgan(
    network: Generator,
    images: Float[Tensor, "n c h w"],
    random: torch.Generator,
    steps: int = 2000,
    batch_size: int = BATCH_SIZE,
    learning_rate: float = 5e-4,
    checkpoint: Path | None = None,
) -> Generator:
    """Train `network` on `images` from scratch: `steps` steps of the generator, five of its critic before each.

    Adam with the authors' moments; their learning rate is 1e-4, for 200,000 steps. With `checkpoint`, training
    saves its state to that file now and then, resumes from it, and removes it at the end; the weights are those
    of an uninterrupted training. Layers compute in bfloat16 where the processor has instructions for it.
    """
    if steps < 1 or batch_size < 1:
        raise ConfigurationError(f"expected steps and batch_size >= 1, got {steps} and {batch_size}")
    if not len(images):
        raise ConfigurationError("expected at least one image, got none")
    shape = (network.channels, network.height, network.width)
    if tuple(images.shape[1:]) != shape:
        raise ConfigurationError(f"expected images of shape {shape}, as generated, got {tuple(images.shape[1:])}")
    training = _Training(network, random, learning_rate)
    done = training.resume(checkpoint)
    device = network.first.bias.device
    halves = {kind: device.type == kind and has_bfloat16(device) for kind in ("cpu", "cuda")}
    with (
        reporting("wgan", steps - done) as reporter,
        torch.inference_mode(False),
        torch.enable_grad(),
        # The cache would keep the rounded weights of the first step.
        torch.autocast("cpu", torch.bfloat16, halves["cpu"], cache_enabled=False),
        torch.autocast("cuda", torch.bfloat16, halves["cuda"], cache_enabled=False),
    ):
        for step in range(done, steps):
            # A constant learning rate ends on a noisy iterate; the authors' linear decay, for CIFAR-10, does not.
            distance = training.step(images, batch_size, learning_rate * (1 - step / steps))
            reporter.advance(distance=distance)
            if checkpoint is not None and (step + 1) % SAVE_EVERY == 0 and step + 1 < steps:
                training.save(checkpoint, step + 1)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return network


class _Training:
    """The networks, their optimizers and the randomness of a training."""

    def __init__(self, network: Generator, random: torch.Generator, learning_rate: float) -> None:
        self.network, self.random = network, random
        self.critic = Critic(network.channels, network.height, network.width, network.features)
        self.critic.to(network.first.bias)
        for part in (network, self.critic):
            reset(part, random)
        self.optimizers = [
            torch.optim.Adam(part.parameters(), learning_rate, BETAS) for part in (network, self.critic)
        ]

    def step(self, images: Tensor, batch_size: int, learning_rate: float) -> float:
        """Train the critic and then the generator; the critic's estimate of the Wasserstein distance."""
        of_generator, of_critic = self.optimizers
        for group in (*of_generator.param_groups, *of_critic.param_groups):
            group["lr"] = learning_rate
        distance = torch.zeros(())
        for real in self._batches(images, batch_size):
            with torch.no_grad():
                fake = self.network(self._normal(len(real)))
            mix = torch.rand(len(real), 1, 1, 1, generator=self.random).to(real)
            distance = self.critic(real).mean() - self.critic(fake).mean()
            loss = PENALTY * gradient_penalty(self.critic, real, fake, mix) - distance
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        (-self.critic(self.network(self._normal(batch_size))).mean()).backward()
        of_generator.step()
        return float(distance.detach())

    def save(self, path: Path, step: int) -> None:
        stored = io.BytesIO()
        torch.save({**self._state(), "random": self.random.get_state(), "step": step}, stored)
        write_atomically(path, stored.getvalue())

    def resume(self, path: Path | None) -> int:
        """Load the state at `path`, if there is one; the number of steps done."""
        if path is None or not path.is_file():
            return 0
        stored = torch.load(path, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(stored[name])
        self.random.set_state(stored["random"])
        return int(stored["step"])

    def _parts(self) -> dict[str, Any]:
        named = zip(("of_generator", "of_critic"), self.optimizers, strict=True)
        return {"network": self.network, "critic": self.critic, **dict(named)}

    def _state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def _batches(self, images: Tensor, batch_size: int) -> Iterator[Tensor]:
        bias = self.network.first.bias
        for _ in range(CRITIC_STEPS):
            chosen = torch.randint(len(images), (batch_size,), generator=self.random)
            yield images[chosen.to(images.device)].to(bias)

    def _normal(self, count: int) -> Tensor:
        return torch.randn(count, self.network.latent, generator=self.random).to(self.network.first.bias)
