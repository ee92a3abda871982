"""PixelCNN++ (Salimans, Karpathy, Chen & Kingma, 2017): the likelihood of an image, pixel by pixel.

Each pixel has a mixture of discretized logistic distributions that depends on earlier pixels only; within it a
later channel's mean depends linearly on earlier channels. Two streams of feature maps lead to it: one sees all
rows above, the other also what lies to the left, so there is no blind spot. Gated residual layers stand at three
resolutions on the way down and up again, with shortcuts between the two; convolutions are weight-normalized.

A layer computes any region of its output from the maps it reads. So training, which computes whole images, and
`PlusRaster`, which goes through them pixel by pixel and computes every feature once, run the same code.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d, elu, logsigmoid, pad

from menet.errors import ConfigurationError

LOG_SCALES = (-7.0, 20.0)
"""Bounds; the lower one is published, the upper keeps logarithms finite."""
DROPOUT = 0.5
COARSEST = 4
"""The stride of the coarsest maps, by which the sides of an image must be divisible."""


class Region(NamedTuple):
    """Rows from `top` to before `bottom` and columns from `left` to before `right`, in a layer's own grid."""

    top: int
    bottom: int
    left: int
    right: int


def concat_elu(maps: Tensor) -> Tensor:
    return elu(torch.cat((maps, -maps), 1))


def same(maps: Tensor) -> Tensor:
    return maps


class Convolution(nn.Module):
    """A weight-normalized convolution whose window begins `top` rows above and `left` columns left of a position.

    With `up` it is transposed: it doubles the resolution. In `initializing` mode it scales and shifts its outputs
    to zero mean and a deviation of `scale` over the batch.
    """

    initializing = False

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: tuple[int, int] = (1, 1),
        top: int = 0,
        left: int = 0,
        *,
        stride: int = 1,
        up: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        shape = (inputs, outputs) if up else (outputs, inputs)
        self.direction = nn.Parameter(torch.zeros(*shape, *size))
        self.gain = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.size, self.top, self.left, self.stride, self.up, self.scale = size, top, left, stride, up, scale

    def forward(self, maps: Tensor, region: Region, activation: Callable[[Tensor], Tensor] = same) -> Tensor:
        out = self._convolved(activation(self._window(maps, region)), region)
        if self.initializing:
            deviation, mean = torch.std_mean(out, (0, 2, 3), correction=0)
            factor = self.scale / (deviation + 1e-5)
            self.gain.data.mul_(factor)
            self.bias.data.sub_(mean).mul_(factor)
            out = (out - mean[:, None, None]) * factor[:, None, None]
        return out

    def _convolved(self, window: Tensor, region: Region) -> Tensor:
        others = (0, 2, 3) if self.up else (1, 2, 3)
        norm = self.direction.square().sum(others, keepdim=True).sqrt().clamp(min=1e-12)
        weight = self.direction / norm * (self.gain[:, None, None] if self.up else self.gain[:, None, None, None])
        if not self.up:
            return conv2d(window, weight, self.bias, self.stride)
        # A window of three columns is centered: half a step is cropped at either side.
        aside = (self.size[1] - 1) // 2
        out = conv_transpose2d(window, weight, self.bias, 2, padding=(0, aside), output_padding=(0, aside))
        top, left = region.top % 2, region.left % 2
        return out[:, :, top : top + region.bottom - region.top, left : left + region.right - region.left]

    def _window(self, maps: Tensor, region: Region) -> Tensor:
        """The part of `maps` that a region of the output depends on, with zeros beyond the border."""
        if self.up:
            return maps[:, :, region.top // 2 : -(-region.bottom // 2), region.left // 2 : -(-region.right // 2)]
        (high, wide), step = self.size, self.stride
        top, left = region.top * step - self.top, region.left * step - self.left
        bottom = (region.bottom - 1) * step - self.top + high
        right = (region.right - 1) * step - self.left + wide
        height, width = maps.shape[2:]
        inside = maps[:, :, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
        beyond = max(right - width, 0), max(bottom - height, 0)
        before = right - left - inside.shape[3] - beyond[0], bottom - top - inside.shape[2] - beyond[1]
        return pad(inside, (before[0], beyond[0], before[1], beyond[1]))


class Layer(nn.Module):
    """Computes maps from other maps: those numbered `reads`, on a grid of every `stride`-th pixel.

    `above` tells the stream that sees rows above alone, whose maps of a row can be computed before that row.
    """

    def __init__(self, reads: Sequence[int], stride: int, above: bool, outputs: int) -> None:
        super().__init__()
        self.reads, self.stride, self.above, self.outputs = tuple(reads), stride, above, outputs


class Sum(Layer):
    """The sum of convolutions of the same activation, one for each of the maps it reads."""

    def __init__(
        self,
        reads: Sequence[int],
        stride: int,
        above: bool,
        parts: Sequence[Convolution],
        activation: Callable[[Tensor], Tensor] = same,
    ) -> None:
        super().__init__(reads, stride, above, parts[0].bias.numel())
        self.parts, self.activation = nn.ModuleList(parts), activation

    def forward(self, maps: Sequence[Tensor], region: Region, generator: torch.Generator | None) -> Tensor:
        pairs = zip(self.reads, self.parts, strict=True)
        return torch.stack([part(maps[read], region, self.activation) for read, part in pairs]).sum(0)


class Gate(Layer):
    """The end of a gated residual layer: x + a·σ(b), where a and b are convolutions of the hidden maps."""

    def __init__(self, reads: tuple[int, int], stride: int, above: bool, convolution: Convolution) -> None:
        super().__init__(reads, stride, above, convolution.bias.numel() // 2)
        self.convolution = convolution

    def forward(self, maps: Sequence[Tensor], region: Region, generator: torch.Generator | None) -> Tensor:
        before, hidden = (maps[read] for read in self.reads)

        def activated(window: Tensor) -> Tensor:
            out = concat_elu(window)
            if generator is None:
                return out
            kept = torch.rand(out.shape, generator=generator, device=out.device) >= DROPOUT
            return out * kept / (1 - DROPOUT)

        value, gate = self.convolution(hidden, region, activated).chunk(2, 1)
        top, bottom, left, right = region
        return before[:, :, top:bottom, left:right] + value * gate.sigmoid()


class PixelCNNPlusPlus(nn.Module):
    """Distributions of each value given the earlier ones, of `levels` values from 0 to 1.

    `width` feature maps, `layers` gated residual layers per block (six blocks), `mixtures` logistic components.
    The published network for CIFAR-10 has 160, 5 and 10. `generator` draws the dropout while in training mode.
    """

    def __init__(
        self, channels: int = 3, levels: int = 256, width: int = 160, layers: int = 5, mixtures: int = 10
    ) -> None:
        super().__init__()
        for name, value, least, most in (
            ("channels", channels, 1, 64),
            ("levels", levels, 2, 256),
            ("width", width, 1, 1024),
            ("layers", layers, 1, 64),
            ("mixtures", mixtures, 1, 100),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"expected {name} from {least} to {most}, got {value}")
        self.channels, self.levels, self.width = channels, levels, width
        self.layers, self.mixtures = layers, mixtures
        self.generator: torch.Generator | None = None
        self.steps = nn.ModuleList(_steps(channels, width, layers, self._numbers()))

    def _numbers(self) -> int:
        """Numbers that describe the mixture of a pixel: weights, means, log-scales and coefficients."""
        return self.mixtures * (1 + 2 * self.channels + self.channels * (self.channels - 1) // 2)

    def planes(self, images: Float[Tensor, "b c h w"]) -> list[Tensor]:
        """The first maps: the image on [-1, 1] and ones, which tell it from the border."""
        if images.shape[2] % COARSEST or images.shape[3] % COARSEST:
            raise ConfigurationError(f"expected sides divisible by {COARSEST}, got {tuple(images.shape[2:])}")
        return [torch.cat((2 * images - 1, torch.ones_like(images[:, :1])), 1)]

    def mixture(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b numbers h w"]:
        """The numbers that describe the mixture of each pixel."""
        maps, (height, width) = self.planes(images), images.shape[2:]
        generator = self.generator if self.training else None
        for layer in self.in_order():
            region = Region(0, height // layer.stride, 0, width // layer.stride)
            maps.append(layer(maps, region, generator))
        return maps[-1]

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c levels h w"]:
        """Log-probabilities of each value given the earlier ones."""
        pixels = images.movedim(1, -1)
        mixture = Mixture(self, self.mixture(images).movedim(1, -1))
        found = []
        for channel in range(self.channels):
            found.append(mixture.of_levels(channel))
            mixture.observe(channel, pixels[..., channel])
        return torch.stack(found, 1).movedim(-1, 2)

    def quantize(self, images: Float[Tensor, "b c h w"]) -> Int[Tensor, "b c h w"]:
        """The index of the nearest level."""
        return (images * (self.levels - 1)).round().long()

    def bits_per_dimension(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, ""]:
        """The mean of −log₂ of the probability of each value; log₂(levels) for a uniform distribution."""
        images = self.quantize(images).to(images.dtype) / (self.levels - 1)
        mixture = Mixture(self, self.mixture(images).movedim(1, -1))
        for channel in range(self.channels):
            mixture.observe(channel, images[:, channel])
        return -mixture.evidence.mean() / (self.channels * math.log(2))

    def reset(self, generator: torch.Generator) -> None:
        """Initialize all weights; `initialize` then scales them by the data."""
        for part in self._convolutions():
            drawn = 0.05 * torch.randn(part.direction.shape, generator=generator)
            part.direction.data.copy_(drawn)
            part.gain.data.fill_(1)
            part.bias.data.zero_()

    @torch.no_grad()
    def initialize(self, images: Float[Tensor, "b c h w"]) -> None:
        """Data-dependent initialization (Salimans & Kingma, 2016): outputs of zero mean and unit deviation."""
        try:
            for part in self._convolutions():
                part.initializing = True
            self.mixture(images)
        finally:
            for part in self._convolutions():
                part.initializing = False

    def raster(self, like: Float[Tensor, "b c h w"]) -> "PlusRaster":
        """Images like these, to be generated value by value."""
        return PlusRaster(self, like)

    def settings(self) -> dict[str, Any]:
        names = ("channels", "levels", "width", "layers", "mixtures")
        return {name: getattr(self, name) for name in names}

    def in_order(self) -> list[Layer]:
        """The layers, each after those whose maps it reads."""
        return [layer for layer in self.steps if isinstance(layer, Layer)]

    def _convolutions(self) -> list[Convolution]:
        return [part for part in self.modules() if isinstance(part, Convolution)]


class Mixture:
    """Discretized logistic mixtures of pixels, whose channels are observed one after another.

    All channels of a pixel share one component; what is observed changes how likely each of them is.
    """

    def __init__(self, network: PixelCNNPlusPlus, numbers: Float[Tensor, "*pixels numbers"]) -> None:
        count, channels = network.mixtures, network.channels
        weights, means, scales, self.coefficients = numbers.unflatten(-1, (-1, count)).split(
            [1, channels, channels, channels * (channels - 1) // 2], -2
        )
        self.levels = network.levels
        self.means = list(means.unbind(-2))
        self.log_scales = scales.clamp(*LOG_SCALES).unbind(-2)
        self.coefficients = self.coefficients.tanh()
        self.joint = weights[..., 0, :].log_softmax(-1)
        """Log-probability of each component together with what was observed."""

    @property
    def evidence(self) -> Tensor:
        """Log-probability of what was observed."""
        return self.joint.logsumexp(-1)

    def of_levels(self, channel: int) -> Float[Tensor, "*pixels levels"]:
        """Log-probabilities of a channel's levels, given the observed channels."""
        levels = torch.arange(self.levels, device=self.joint.device, dtype=self.joint.dtype) / (self.levels - 1)
        mean, scale = self.means[channel][..., None, :], self.log_scales[channel][..., None, :]
        joint = self.joint[..., None, :] + self._log_probability(levels[:, None], mean, scale)
        return joint.logsumexp(-1) - self.evidence[..., None]

    def observe(self, channel: int, values: Float[Tensor, "*pixels"]) -> None:
        """Condition later channels on the values of this one."""
        given = values[..., None]
        mean, scale = self.means[channel], self.log_scales[channel]
        self.joint = self.joint + self._log_probability(given, mean, scale)
        # The coefficients of a channel follow those of the channels before it.
        for later in range(channel + 1, len(self.means)):
            coefficient = self.coefficients[..., later * (later - 1) // 2 + channel, :]
            self.means[later] = self.means[later] + coefficient * (2 * given - 1)

    def _log_probability(self, values: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
        """Of the bin of each value under each component: σ(a) − σ(b) = σ(a)·σ(−b)·(1 − exp(b − a))."""
        half, rate = 1 / (self.levels - 1), (-log_scale).exp()
        centered = 2 * values - 1 - mean
        above, below = rate * (centered + half), rate * (centered - half)
        inside = logsigmoid(above) + logsigmoid(-below) + (-torch.expm1(-2 * half * rate)).log()
        # The lowest and the highest bin have no end.
        lowest, highest = values < half / 2, values > 1 - half / 2
        return torch.where(lowest, logsigmoid(above), torch.where(highest, logsigmoid(-below), inside))


class PlusRaster:
    """A batch of images being generated value by value, with the feature maps computed so far.

    Each feature is computed once, when the pixels it depends on are known: the stream of rows above at the
    beginning of a row, the other at its pixel, coarse ones at every second or fourth.
    """

    def __init__(self, network: PixelCNNPlusPlus, like: Float[Tensor, "b c h w"]) -> None:
        self.network, (self.height, self.across) = network, like.shape[2:]
        self.maps = network.planes(torch.zeros_like(like))
        for layer in network.in_order():
            size = (self.height // layer.stride, self.across // layer.stride)
            self.maps.append(like.new_zeros(len(like), layer.outputs, *size))

    def logits_at(self, row: int, column: int, channel: int) -> Float[Tensor, "b levels"]:
        """Log-probabilities of a value after all earlier ones were written; call it in their order."""
        if channel == 0:
            if column == 0:
                self._compute(row, None)
            self._compute(row, column)
            self.mixture = Mixture(self.network, self.maps[-1][:, :, row, column])
        return self.mixture.of_levels(channel)

    def write(self, row: int, column: int, channel: int, values: Float[Tensor, " b"]) -> None:
        self.maps[0][:, channel, row, column] = 2 * values - 1
        self.mixture.observe(channel, values)

    def _compute(self, row: int, column: int | None) -> None:
        """The maps of a row in the stream of rows above, or of a pixel in the other."""
        for number, layer in enumerate(self.network.in_order(), 1):
            stride = layer.stride
            if layer.above != (column is None) or row % stride or (column or 0) % stride:
                continue
            left, right = (
                (0, self.across // stride) if column is None else (column // stride, column // stride + 1)
            )
            region = Region(row // stride, row // stride + 1, left, right)
            self.maps[number][:, :, region.top, left:right] = layer(self.maps, region, None)[:, :, 0]


def _steps(channels: int, width: int, layers: int, numbers: int) -> list[Layer]:
    """The layers in order; maps are numbered from 0, which is the image, each layer's being the next."""
    steps: list[Layer] = []

    def add(layer: Layer) -> int:
        steps.append(layer)
        return len(steps)

    def convolution(above: bool, inputs: int, outputs: int, **options: Any) -> Convolution:
        # Rows above see a column to either side; the other stream sees up and to the left.
        return Convolution(inputs, outputs, (2, 3) if above else (2, 2), 1, 1, **options)

    def gated(above: bool, stride: int, before: int, asides: Sequence[int] = ()) -> int:
        parts = [convolution(above, 2 * width, width)]
        parts += [Convolution(2 * width, width) for _ in asides]
        hidden = add(Sum((before, *asides), stride, above, parts, concat_elu))
        gate = convolution(above, 2 * width, 2 * width, scale=0.1)
        return add(Gate((before, hidden), stride, above, gate))

    seen = channels + 1
    up = [add(Sum((0,), 1, True, [Convolution(seen, width, (2, 3), 2, 1)]))]
    firsts = [Convolution(seen, width, (1, 3), 1, 1), Convolution(seen, width, (2, 1), 1, 1)]
    left = [add(Sum((0, 0), 1, False, firsts))]
    for stride in (1, 2, 4):
        if stride > 1:
            up.append(add(Sum((up[-1],), stride, True, [convolution(True, width, width, stride=2)])))
            left.append(add(Sum((left[-1],), stride, False, [convolution(False, width, width, stride=2)])))
        for _ in range(layers):
            up.append(gated(True, stride, up[-1]))
            left.append(gated(False, stride, left[-1], (up[-1],)))
    above, beside = up.pop(), left.pop()
    for stride in (4, 2, 1):
        if stride < COARSEST:
            above = add(Sum((above,), stride, True, [_doubling(width, (2, 3))]))
            beside = add(Sum((beside,), stride, False, [_doubling(width, (2, 2))]))
        for _ in range(layers + (stride < COARSEST)):
            above = gated(True, stride, above, (up.pop(),))
            beside = gated(False, stride, beside, (above, left.pop()))
    assert not up
    add(Sum((beside,), 1, False, [Convolution(width, numbers)], elu))
    return steps


def _doubling(width: int, size: tuple[int, int]) -> Convolution:
    return Convolution(width, width, size, up=True)
