"""The networks: what all of them share, and their bodies, which compute feature vectors from images.

Shared are normalization and a linear head; the bodies are LeNet, perceptrons and experts, ResNets and a DenseNet.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.errors import ConfigurationError

LARGEST_SIDE = 512
"""Of images that experts look at."""
SMALL_SIDE = 48
"""Up to this side the stem of `Compact` keeps the resolution, above it halves it."""


@dataclass(frozen=True)
class Architecture:
    """All that is needed to build a network again, without its weights."""

    name: str
    channels: int
    side: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.channels}×{self.side}×{self.side}, {self.classes} classes)"


class Normalize(nn.Module):
    """(images − mean) / std per channel, the first layer of a network.

    Attacks and defenses therefore only see pixels in [0,1]. Mean and standard deviation are buffers: they move
    with the network's device and are stored with its weights. Images with another number of channels are
    refused, since one channel would silently broadcast over three.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if images.shape[1] != len(self.mean):
            raise ConfigurationError(f"expected images of {len(self.mean)} channels, got {images.shape[1]}")
        return (images - self.mean) / self.std


class Body(nn.Module):
    """The layers between normalization and head: images (b,c,h,w) → feature vectors (b, width).

    One that sees an image in cells returns a vector for each, (b, cells, width).
    """

    width: int


class Network(nn.Module):
    """A classifier of images in [0,1].

    `features` returns the penultimate activations (t-SNE and class distances are computed from them), `forward`
    applies the linear `head` to them, and `architecture` says how the network was built.
    """

    def __init__(self, architecture: Architecture, body: Body) -> None:
        super().__init__()
        self.architecture = architecture
        self.normalize = Normalize(architecture.mean, architecture.std)
        self.body = body
        self.head = nn.Linear(body.width, architecture.classes, device=next(body.parameters()).device)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        """The penultimate activations, which the head maps to logits; of cells their mean."""
        vectors: Tensor = self.body(self.normalize(images))
        return vectors.mean(1) if vectors.ndim == 3 else vectors

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        logits: Tensor = self.head(self.features(images))
        return logits

    @property
    def partitions(self) -> Int[Tensor, "r h w"] | None:
        """Of a network of experts the cell that each pixel belongs to, in each partition; None for others."""
        layout: Tensor | None = getattr(self.body, "layout", None)
        return layout

    def cell_logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b cells classes"]:
        """The logits of each cell of a network of experts, whose mean `forward` returns; of others one cell."""
        vectors: Tensor = self.body(self.normalize(images))
        logits: Tensor = self.head(vectors)
        return logits if logits.ndim == 3 else logits[:, None]


def average(maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c"]:
    """Global average pooling, which makes a network independent of the image size."""
    return torch.mean(maps, dim=(2, 3))


class LeNet(Body):
    """Two 5×5 convolutions (32, 64), each followed by ReLU and 2×2 max pooling, then 1024 hidden units.

    The hidden layer sees every position, so the network only takes images of the side it was built for.
    """

    width = 1024

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 32, 5, padding=2)
        self.second = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * (side // 4) ** 2, self.width)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 1024"]:
        maps = nn.functional.max_pool2d(torch.relu(self.first(images)), 2)
        maps = nn.functional.max_pool2d(torch.relu(self.second(maps)), 2)
        return torch.relu(self.hidden(maps.flatten(1)))


class MLP(Body):
    """Three layers of 512 units with batch normalization, the last two with a shortcut; 1.3 million weights.

    For images of which so few pixels are observed that neighbors hardly ever are: an ablation with p below 0.1.
    There it is several times as fast as a LeNet. It only takes images of the side it was built for.
    """

    width = 512

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        sizes = [channels * side**2, self.width, self.width, self.width]
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(self.width) for _ in self.layers)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 512"]:
        vectors = images.flatten(1)
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            update = torch.relu(norm(layer(vectors)))
            vectors = vectors + update if number else update
        return vectors


class Experts(Body):
    """A perceptron of two hidden layers for each cell of some partitions of the image.

    `layout` gives the cell of each pixel of an image of that shape, in each partition (`masks.lattices`). An
    expert's vector depends on the pixels of its cell alone, which is what a certificate by partitions rests on
    (Hammoudeh & Lowd 2023 train an ensemble for it). All experts are computed together, as batched products:
    every step of training shows each of them each image. It only takes images of the side it was built for.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        layout: Callable[[tuple[int, int]], Int[Tensor, "r h w"]],
        width: int = 128,
    ) -> None:
        super().__init__()
        if side > LARGEST_SIDE:
            raise ConfigurationError(f"expected side <= {LARGEST_SIDE} for experts, got {side}")
        # Not buffers: they follow from the name of the network, which may be outlined on the meta device.
        with torch.device("cpu"):
            self.layout = layout((side, side))
            self.pixels = pixels_of_cells(self.layout)
        experts, most = self.pixels.shape
        self.width = width
        self.first = GroupedLinear(experts, channels * most, width)
        self.second = GroupedLinear(experts, width, width)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b cells width"]:
        pixels = self.pixels.to(images.device)
        # Pixels first, so that what is gathered are contiguous rows; a last one of zeros fills small cells.
        flat = nn.functional.pad(images.flatten(2), (0, 1)).permute(2, 1, 0).flatten(1)
        seen = flat[pixels.flatten()].view(*pixels.shape, *images.shape[1::-1]).flatten(1, 2).transpose(1, 2)
        return torch.relu(self.second(torch.relu(self.first(seen)))).transpose(0, 1)


class GroupedLinear(nn.Module):
    """As many linear layers as there are groups, each for its own inputs."""

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(groups, 1, outputs))

    def forward(self, vectors: Float[Tensor, "groups b inputs"]) -> Float[Tensor, "groups b outputs"]:
        return torch.baddbmm(self.bias, vectors, self.weight)


def pixels_of_cells(layout: Int[Tensor, "r h w"]) -> Int[Tensor, "all most"]:
    """The pixels of each cell, partition by partition; the number of pixels of the image stands for none."""
    cells, pixels = int(layout.max()) + 1, layout[0].numel()
    own = (layout.flatten(1) + cells * torch.arange(len(layout))[:, None]).flatten()
    sizes = torch.bincount(own, minlength=len(layout) * cells)
    order = own.argsort(stable=True)
    within = torch.arange(len(own)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    found = torch.full((len(sizes), int(sizes.max())), pixels)
    found[own[order], within] = order % pixels
    return found


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch normalization plus a shortcut (He et al. 2016, figure 5 left).

    Where the shape changes, the shortcut is a 1×1 convolution with batch normalization.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        inner = torch.relu(self.first_norm(self.first(maps)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut(maps))


class ResNet(Body):
    """A 3×3 stem at full resolution and stages of basic blocks; all stages but the first halve the resolution.

    `widths` and `blocks` are one number per stage. ResNet-18 is the default.
    """

    def __init__(
        self, channels: int, widths: Sequence[int] = (64, 128, 256, 512), blocks: Sequence[int] = (2, 2, 2, 2)
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        layers = []
        inputs = widths[0]
        for stage, (outputs, count) in enumerate(zip(widths, blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.width = inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(self.blocks(torch.relu(self.stem_norm(self.stem(images)))))


class Small(Body):
    """For quick runs, demonstrations and tests: a 4×4 stem of stride 2 and three blocks; 0.3 million weights.

    Halving the resolution in the first layer is what makes it quick: 12 million multiplications for a 32×32
    image, against 556 million of ResNet-18. It is independent of the side through global pooling.
    """

    width = 128

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 32, 4, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(BasicBlock(32, 32, 1), BasicBlock(32, 64, 2), BasicBlock(64, 128, 2))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 128"]:
        return average(self.blocks(torch.relu(self.stem_norm(self.stem(images)))))


class ConvolutionUnit(nn.Sequential):
    """A convolution, pooling to half the resolution or none, batch normalization and ReLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1, pool: bool = False) -> None:
        padding = (size - 1) // 2 if size % 2 else 0
        layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)]
        layers += [nn.MaxPool2d(2)] if pool else []
        super().__init__(*layers, nn.BatchNorm2d(outputs), nn.ReLU())


class Compact(Body):
    """For robust training on a few cores: a small stem, then three pairs of convolutions with pooling in each.

    The shape of airbench94 (Jordan 2024), which learned most of those compared (docs/training.md). Most of its
    operations are products of many channels at few positions, where a CPU comes nearest to the speed of its
    matrix products. Large images are halved by the stem.
    """

    def __init__(self, channels: int, side: int = 32, widths: Sequence[int] = (64, 256, 256)) -> None:
        super().__init__()
        stride = 1 if side <= SMALL_SIDE else 2
        layers, inputs = [ConvolutionUnit(channels, 24, 2 * stride, stride)], 24
        for width in widths:
            layers += [ConvolutionUnit(inputs, width, pool=True), ConvolutionUnit(width, width)]
            inputs = width
        self.layers, self.width = nn.Sequential(*layers), inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(self.layers(images))


class PreactivationBlock(nn.Module):
    """Batch normalization, ReLU, 3×3 convolution, twice, plus a shortcut.

    Where the width changes, the shortcut is a bare 1×1 convolution of the normalized maps.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        active = torch.relu(self.first_norm(maps))
        inner = self.second(torch.relu(self.second_norm(self.first(active))))
        return inner + (maps if self.shortcut is None else self.shortcut(active))


class WideResNet(Body):
    """WRN-depth-factor (Zagoruyko and Komodakis 2016), without dropout.

    Three stages of (depth − 4) / 6 blocks are 16, 32 and 64 times `factor` wide.
    """

    def __init__(self, channels: int, depth: int = 28, factor: int = 10) -> None:
        super().__init__()
        count, rest = divmod(depth - 4, 6)
        if rest or count < 1:
            raise ConfigurationError(f"expected a depth of 4 + 6n layers (10, 16, 22, 28, …), got {depth}")
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        layers = []
        inputs = 16
        for stage, outputs in enumerate((16 * factor, 32 * factor, 64 * factor)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(PreactivationBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(inputs)
        self.width = inputs

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(torch.relu(self.norm(self.blocks(self.stem(images)))))


class DenseLayer(nn.Module):
    """Bottleneck 1×1 then 3×3 convolution, pre-activated; its input is concatenated with `growth` new maps."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(inputs)
        self.first = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(4 * growth)
        self.second = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        inner = self.first(torch.relu(self.first_norm(maps)))
        return torch.cat([maps, self.second(torch.relu(self.second_norm(inner)))], dim=1)


class Transition(nn.Module):
    """Halves the number of maps and the resolution."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.reduce = nn.Conv2d(inputs, inputs // 2, 1, bias=False)

    def forward(self, maps: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        return nn.functional.avg_pool2d(self.reduce(torch.relu(self.norm(maps))), 2)


class DenseNet(Body):
    """Dense blocks with transitions between them, behind a 3×3 stem at full resolution.

    The default is DenseNet-121. The ImageNet form starts with a 7×7 convolution of stride 2 and max pooling,
    which would leave 64×64 images 2×2 positions at the end; this form, otherwise the same, leaves them 8×8.
    """

    def __init__(self, channels: int, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        for block, count in enumerate(blocks):
            if block > 0:
                layers.append(Transition(width))
                width //= 2
            for _ in range(count):
                layers.append(DenseLayer(width, growth))
                width += growth
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(width)
        self.width = width

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return average(torch.relu(self.norm(self.blocks(self.stem(images)))))
