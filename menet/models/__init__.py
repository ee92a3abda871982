"""The paper's networks, and some for a few cores: images in [0,1] → logits, normalization inside.

Here the networks by name, and their initial weights.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from menet import masks
from menet.errors import ConfigurationError
from menet.models import weights
from menet.models.networks import (
    MLP,
    Architecture,
    Body,
    Compact,
    DenseNet,
    Experts,
    GroupedLinear,
    LeNet,
    Network,
    Normalize,
    ResNet,
    Small,
    WideResNet,
)

__all__ = ["NETWORKS", "Architecture", "Network", "Normalize", "build", "initialize", "weights"]

NETWORKS: dict[str, Callable[[int, int], Body]] = {
    "lenet": lambda channels, side: LeNet(channels, side),
    "resnet18": lambda channels, side: ResNet(channels),
    "wide-resnet-28-10": lambda channels, side: WideResNet(channels, depth=28),
    "wide-resnet-34-10": lambda channels, side: WideResNet(channels, depth=34),
    "densenet121": lambda channels, side: DenseNet(channels),
    "compact": lambda channels, side: Compact(channels, side),
    "small": lambda channels, side: Small(channels),
    "mlp": lambda channels, side: MLP(channels, side),
    "experts-1x25": lambda channels, side: Experts(channels, side, partial(masks.lattices, 1, 25)),
    "experts-3x25": lambda channels, side: Experts(channels, side, partial(masks.lattices, 3, 25)),
    "experts-1x49": lambda channels, side: Experts(channels, side, partial(masks.lattices, 1, 49)),
    "experts-3x49": lambda channels, side: Experts(channels, side, partial(masks.lattices, 3, 49)),
    "experts-1x64": lambda channels, side: Experts(channels, side, partial(masks.lattices, 1, 64)),
    "experts-3x64": lambda channels, side: Experts(channels, side, partial(masks.lattices, 3, 64)),
    "experts-lines": lambda channels, side: Experts(channels, side, masks.lines),
}

MIN_SIDE = 8  # DenseNet halves three times
MAX_SIZE = 65_536  # of channels, side and classes; anything larger is a mistake
MAX_PARAMETERS = 1_000_000_000  # 4 GB; a file's header must not be able to ask for more


@runtime_checkable
class DatasetLike(Protocol):
    """What `build` needs of a dataset: the shape of its images, its classes and its normalization."""

    @property
    def images(self) -> Any: ...  # anything with a `shape` (N,C,H,W)
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def mean(self) -> Sequence[float]: ...
    @property
    def std(self) -> Sequence[float]: ...


def build(
    name: str,
    like: DatasetLike | None = None,
    *,
    channels: int | None = None,
    side: int | None = None,
    classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> Network:
    """A network with fresh weights, its input and output sizes taken from the dataset `like`.

    Arguments override `like`; without either, images are 3×32×32 and there are 10 classes. Mean and standard
    deviation are of pixels in [0,1]; without them, or with other channels than those of `like`, images are not
    normalized. Weights are drawn from `generator`; without it from torch's global generator, as in any
    `nn.Module`.
    """
    if like is not None:
        shape = tuple(like.images.shape)
        if len(shape) != 4 or shape[2] != shape[3]:
            raise ConfigurationError(
                f"expected square images of shape (n, channels, side, side), got {shape}; "
                "folder:PATH@64 crops a folder of images to 64×64"
            )
        channels = shape[1] if channels is None else channels
        side = shape[2] if side is None else side
        classes = len(like.classes) if classes is None else classes
        if channels == shape[1]:
            mean = like.mean if mean is None else mean
            std = like.std if std is None else std
    channels = _check_size("channels", 3 if channels is None else channels)
    architecture = Architecture(
        name,
        channels,
        32 if side is None else side,
        10 if classes is None else classes,
        (0.0,) * channels if mean is None else tuple(map(float, mean)),
        (1.0,) * channels if std is None else tuple(map(float, std)),
    )
    return construct(architecture, generator)


def construct(architecture: Architecture, generator: torch.Generator | None = None) -> Network:
    """The network that `architecture` describes, with fresh weights."""
    network = outline(architecture)
    network.body.to_empty(device="cpu")
    network.head.to_empty(device="cpu")
    initialize(network, generator)
    return network


def outline(architecture: Architecture) -> Network:
    """The network with its weights on the meta device: shapes and counts that cost no memory or time."""
    _check(architecture)
    with torch.device("meta"):
        body = NETWORKS[architecture.name](architecture.channels, architecture.side)
    network = Network(architecture, body)
    count = sum(parameter.numel() for parameter in network.parameters())
    if count > MAX_PARAMETERS:
        raise ConfigurationError(f"expected at most {MAX_PARAMETERS:,} weights, got {count:,} for {architecture}")
    return network


def initialize(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `module` anew, in place, and reset its batch statistics.

    Convolutions without bias (those followed by batch normalization) are drawn as in He et al. (2015), normal
    with fan-out; all other layers as torch does, uniform within ±1/√inputs. Without a generator torch's global
    one is used, as in any `nn.Module`.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            if isinstance(layer, nn.Conv2d) and layer.bias is None:
                nn.init.kaiming_normal_(layer.weight, 0, "fan_out", "relu", generator=generator)
                continue
            bound = 1 / math.sqrt(layer.weight[0].numel())
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            if layer.bias is not None:
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        elif isinstance(layer, GroupedLinear):
            # Without batch normalization the usual gain of a ReLU (He et al. 2015) keeps activations in size.
            nn.init.normal_(layer.weight, 0, math.sqrt(2 / layer.weight.shape[1]), generator=generator)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_parameters()
        elif list(layer.parameters(recurse=False)):
            # Networks are built uninitialized: skipped, the layer would keep whatever was in memory.
            raise TypeError(f"initialize: no rule for layer {name!r} ({type(layer).__name__})")


def _check(architecture: Architecture) -> None:
    if architecture.name not in NETWORKS:
        raise ConfigurationError(f"unknown network {architecture.name!r}; choose from {', '.join(NETWORKS)}")
    _check_size("channels", architecture.channels)
    _check_size("side", architecture.side, least=MIN_SIDE)
    _check_size("classes", architecture.classes)
    for field in ("mean", "std"):
        values = getattr(architecture, field)
        if len(values) != architecture.channels:
            raise ConfigurationError(
                f"expected {field} with {architecture.channels} values, one per channel, got {len(values)}"
            )
        if not all(math.isfinite(value) for value in values):
            raise ConfigurationError(f"expected a finite {field}, got {values}")
    if min(architecture.std) <= 0:
        raise ConfigurationError(f"expected std > 0, got {architecture.std}")


def _check_size(field: str, value: int, least: int = 1) -> int:
    if not least <= value <= MAX_SIZE:
        raise ConfigurationError(f"expected {field} between {least} and {MAX_SIZE}, got {value}")
    return value
