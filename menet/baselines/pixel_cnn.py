"""A small PixelCNN (van den Oord, Kalchbrenner & Kavukcuoglu, 2016): the likelihood of an image, pixel by pixel.

Pixels are ordered row by row, and in a pixel the channels red, green, blue. Each value has a distribution over
`levels` that depends only on earlier values: convolutions are masked to see what lies above and to the left, and
feature maps belong to channels, which see only earlier channels of the current pixel. As in any stack of such
convolutions there is a blind spot at the upper right, here beyond the 7×7 window of the first.

Also here: the trainings of this network and of PixelCNN++.
"""

import copy
import io
import math
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, linear, pad

from menet.baselines.pixel_cnn_plus import PixelCNNPlusPlus
from menet.errors import ConfigurationError
from menet.files import write_atomically
from menet.progress import reporting

FIRST = 7
LATER = 3
PLUS_BATCH = 128
"""Images per step of PixelCNN++: 16 on each of eight GPUs in the published training."""
PLUS_PASS = 16
"""Images in one pass of it; gradients of a batch are summed over passes."""
PLUS_DECAY = 0.999995
"""Factor of its learning rate in each step."""
PLUS_AVERAGE = 0.9995
"""Decay of the moving average of its weights, which is what is judged and kept."""
HELD_OUT = 1000
"""Most images that decide when its training ends."""


class CausalConvolution(nn.Module):
    """A convolution that sees pixels above and to the left, and channels of the current pixel up to its own.

    Inputs and outputs are in `channels` equal groups, one for each channel of the image. With `strict` a group
    sees only earlier groups of the current pixel. Weights are zero until `reset`.
    """

    mask: Tensor

    def __init__(self, inputs: int, outputs: int, size: int, channels: int, strict: bool = False) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, size, size))
        self.bias = nn.Parameter(torch.zeros(outputs))
        middle = size // 2
        mask = torch.zeros(outputs, inputs, size, size)
        mask[:, :, :middle] = 1
        mask[:, :, middle, :middle] = 1
        theirs = torch.arange(inputs) // (inputs // channels)
        mine = torch.arange(outputs)[:, None] // (outputs // channels)
        mask[:, :, middle, middle] = (theirs < mine if strict else theirs <= mine).float()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, maps: Float[Tensor, "b inputs h w"]) -> Float[Tensor, "b outputs h w"]:
        return conv2d(maps, self.weight * self.mask, self.bias, padding=self.size // 2)

    def reset(self, generator: torch.Generator) -> None:
        """Initialize the weights, scaled by the number of inputs that the mask leaves."""
        seen = max(1.0, float(self.mask[-1].sum()))
        drawn = torch.randn(self.weight.shape, generator=generator) / math.sqrt(seen)
        self.weight.data.copy_(drawn)
        self.bias.data.zero_()


class PixelCNN(nn.Module):
    """Logits of each value given the earlier ones.

    `width` feature maps per image channel, `layers` residual blocks, `levels` values from 0 to 1.
    """

    def __init__(self, channels: int = 3, levels: int = 256, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        for name, value, least, most in (
            ("channels", channels, 1, 64),
            ("levels", levels, 2, 256),
            ("width", width, 1, 1024),
            ("layers", layers, 0, 64),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"expected {name} from {least} to {most}, got {value}")
        self.channels, self.levels, self.width, self.layers = channels, levels, width, layers
        maps = width * channels
        self.first = CausalConvolution(channels, maps, FIRST, channels, strict=True)
        self.blocks = nn.ModuleList(CausalConvolution(maps, maps, LATER, channels) for _ in range(layers))
        self.last = CausalConvolution(maps, channels * levels, 1, channels)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c levels h w"]:
        maps = self.first(2 * images - 1)
        for block in self.blocks:
            maps = maps + block(maps.relu())
        logits: Tensor = self.last(maps.relu()).unflatten(1, (self.channels, self.levels))
        return logits

    def quantize(self, images: Float[Tensor, "b c h w"]) -> Int[Tensor, "b c h w"]:
        """The index of the nearest level."""
        return (images * (self.levels - 1)).round().long()

    def bits_per_dimension(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        """The mean of −log₂ of the probability of each value; log₂(levels) for a uniform distribution."""
        numbers = self.quantize(images)
        logits = self(numbers / (self.levels - 1))
        return cross_entropy(logits.movedim(2, 1), numbers) / math.log(2)

    def reset(self, generator: torch.Generator) -> None:
        """Initialize all weights; the last layer starts at zero, so that all values are equally likely."""
        for layer in (self.first, *self.blocks):
            layer.reset(generator)
        self.last.weight.data.zero_()
        self.last.bias.data.zero_()

    def raster(self, like: Float[Tensor, "b c h w"]) -> "Raster":
        """Images like these, to be generated value by value."""
        return Raster(self, like)

    def settings(self) -> dict[str, Any]:
        return {"channels": self.channels, "levels": self.levels, "width": self.width, "layers": self.layers}


class Raster:
    """A batch of images being generated value by value, with the feature maps computed so far.

    Feature maps at a value depend on earlier values only, so each is computed once: generating all values costs
    about as much arithmetic as a single forward pass, instead of one pass per value.
    """

    def __init__(self, network: PixelCNN, like: Float[Tensor, "b c h w"]) -> None:
        self.width = network.width
        layers = (network.first, *network.blocks, network.last)
        self.inputs = [_Input.of(layer, network.channels, like) for layer in layers]

    def logits_at(self, row: int, column: int, channel: int) -> Float[Tensor, "b levels"]:
        """The logits of a value after all earlier ones were written; call it in their order."""
        mine = slice(channel * self.width, (channel + 1) * self.width)
        first, *blocks, last = self.inputs
        maps = first.seen_from(row, column, channel)
        for block in blocks:
            block.put(row, column, mine, maps.relu())
            maps = maps + block.seen_from(row, column, channel)
        last.put(row, column, mine, maps.relu())
        return last.seen_from(row, column, channel)

    def write(self, row: int, column: int, channel: int, values: Float[Tensor, " b"]) -> None:
        self.inputs[0].put(row, column, channel, 2 * values - 1)


class _Input(NamedTuple):
    """The inputs of a layer so far, and its weights for each image channel."""

    middle: int
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    plane: Tensor

    @classmethod
    def of(cls, layer: CausalConvolution, channels: int, like: Tensor) -> Self:
        middle = layer.size // 2
        weights = (layer.weight * layer.mask)[:, :, : middle + 1].flatten(1)
        empty = like.new_zeros(len(like), layer.weight.shape[1], *like.shape[2:])
        return cls(middle, weights.chunk(channels), layer.bias.chunk(channels), pad(empty, (middle,) * 4))

    def put(self, row: int, column: int, maps: int | slice, values: Tensor) -> None:
        self.plane[:, maps, row + self.middle, column + self.middle] = values

    def seen_from(self, row: int, column: int, channel: int) -> Tensor:
        window = self.plane[:, :, row : row + self.middle + 1, column : column + 2 * self.middle + 1]
        return linear(window.flatten(1), self.weights[channel], self.biases[channel])


def train_pixel_cnn(
    network: PixelCNN,
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    steps: int = 500,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
) -> PixelCNN:
    """Train `network` on `images` from scratch, with Adam and a cosine schedule down to zero."""
    if steps < 1 or batch_size < 1:
        raise ConfigurationError(f"expected steps and batch_size >= 1, got {steps} and {batch_size}")
    network.reset(generator)
    optimizer = torch.optim.Adam(network.parameters(), learning_rate)
    device = network.last.bias.device
    with reporting("pixel-cnn", steps) as reporter, torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
            chosen = torch.randint(len(images), (batch_size,), generator=generator)
            bits = network.bits_per_dimension(images[chosen.to(images.device)].to(device))
            optimizer.zero_grad()
            bits.backward()
            optimizer.step()
            reporter.advance(bits=float(bits.detach()))
    return network


def train_pixel_cnn_plus(
    network: PixelCNNPlusPlus,
    images: Float[Tensor, "n c h w"],
    generator: torch.Generator,
    steps: int = 400_000,
    patience: int = 10,
    batch_size: int = PLUS_BATCH,
    learning_rate: float = 1e-3,
    checkpoint: Path | None = None,
) -> float:
    """Train from scratch until the held-out likelihood has not improved for `patience` passes over the images.

    Returns the bits per dimension on the held-out images (a tenth, at most 1000) of the weights that are kept:
    averaged, of the best pass. `steps` is the most that are made. An interrupted training resumes from
    `checkpoint`, if given, and on a CPU ends in the bits of an uninterrupted one; a finished one is read from it.
    """
    for name, value in (("steps", steps), ("patience", patience), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigurationError(f"expected {name} >= 1, got {value}")
    count = min(HELD_OUT, len(images) // 10)
    if not count:
        raise ConfigurationError(
            f"expected at least 10 images, a tenth of them to be held out, got {len(images)}"
        )
    order = torch.randperm(len(images), generator=generator).to(images.device)
    held_out, images = images[order[:count]], images[order[count:]]
    training = _PlusTraining(network, images, generator, learning_rate)
    training.resume(checkpoint)
    each = -(-len(images) // batch_size)
    with reporting("pixel-cnn++", steps - training.step) as reporter, torch.enable_grad():
        while training.step < steps and training.waited < patience:
            for _ in range(min(each, steps - training.step)):
                reporter.advance(bits=training.update(images, batch_size))
            training.judge(held_out)
            if checkpoint is not None:
                training.save(checkpoint)
    network.load_state_dict(training.kept)
    network.generator = None
    network.eval()
    return training.best


class _PlusTraining:
    """The network, its averaged weights, the optimizer, the randomness, and what the held-out images said."""

    def __init__(
        self, network: PixelCNNPlusPlus, images: Tensor, generator: torch.Generator, learning_rate: float
    ) -> None:
        self.network, self.random, self.learning_rate = network, generator, learning_rate
        self.device = next(network.parameters()).device
        network.reset(generator)
        network.eval().initialize(images[:PLUS_BATCH].to(self.device))
        self.averaged = copy.deepcopy(network).requires_grad_(False)
        # Dropout needs too many numbers to draw them on the CPU.
        seed = int(torch.randint(2**62, (), generator=generator))
        self.dropout = torch.Generator(self.device).manual_seed(seed)
        network.train().generator = self.dropout
        self.optimizer = torch.optim.Adam(network.parameters(), learning_rate)
        self.step, self.waited, self.best = 0, 0, math.inf
        self.kept = self.averaged.state_dict()

    def update(self, images: Tensor, batch_size: int) -> float:
        """One step; the bits per dimension of its batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * PLUS_DECAY**self.step
        chosen = torch.randint(len(images), (batch_size,), generator=self.random).to(images.device)
        self.optimizer.zero_grad()
        total = 0.0
        for part in chosen.split(PLUS_PASS):
            bits = self.network.bits_per_dimension(images[part].to(self.device)) * (len(part) / batch_size)
            bits.backward()
            total += float(bits.detach())
        self.optimizer.step()
        self.step += 1
        # Averaging from the first step on would keep the initial weights for thousands of steps.
        decay = min(PLUS_AVERAGE, self.step / (self.step + 10))
        with torch.no_grad():
            for mine, theirs in zip(self.averaged.parameters(), self.network.parameters(), strict=True):
                mine.lerp_(theirs, 1 - decay)
        return total

    @torch.no_grad()
    def judge(self, held_out: Tensor) -> None:
        """Keep the averaged weights if they are the best so far."""
        parts = held_out.split(PLUS_PASS)
        bits = [float(self.averaged.bits_per_dimension(part.to(self.device))) * len(part) for part in parts]
        found = sum(bits) / len(held_out)
        self.waited += 1
        if found < self.best:
            self.best, self.waited = found, 0
            self.kept = {name: value.clone() for name, value in self.averaged.state_dict().items()}

    def save(self, path: Path) -> None:
        stored = io.BytesIO()
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        numbers = {"step": self.step, "waited": self.waited, "best": self.best, "kept": self.kept}
        states = {"random": self.random.get_state(), "dropout": self.dropout.get_state()}
        torch.save({**parts, **numbers, **states}, stored)
        write_atomically(path, stored.getvalue())

    def resume(self, path: Path | None) -> None:
        """Load the state at `path`, if there is one."""
        if path is None or not path.is_file():
            return
        stored = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(stored[name])
        self.step, self.waited, self.best = stored["step"], stored["waited"], stored["best"]
        self.kept = stored["kept"]
        self.random.set_state(stored["random"])
        self.dropout.set_state(stored["dropout"])

    def _parts(self) -> dict[str, Any]:
        return {"network": self.network, "averaged": self.averaged, "optimizer": self.optimizer}
