"""The networks by name."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from menet.errors import ConfigurationError
from menet.models.densenet import DenseNet
from menet.models.initialise import initialise
from menet.models.lenet import LeNet
from menet.models.network import Architecture, Body, Network
from menet.models.resnet import ResNet
from menet.models.small import Small
from menet.models.wide_resnet import WideResNet

NETWORKS: dict[str, Callable[[int, int], Body]] = {
    "lenet": lambda channels, side: LeNet(channels, side),
    "resnet18": lambda channels, side: ResNet(channels),
    "wide-resnet-28-10": lambda channels, side: WideResNet(channels, depth=28),
    "wide-resnet-34-10": lambda channels, side: WideResNet(channels, depth=34),
    "densenet121": lambda channels, side: DenseNet(channels),
    "small": lambda channels, side: Small(channels),
}

SMALLEST_SIDE = 8  # DenseNet halves three times
LARGEST = 65_536  # of channels, side and classes; beyond it a number is a mistake
MOST_PARAMETERS = 1_000_000_000  # 4 GB; a file's header must not be able to ask for more


@runtime_checkable
class DatasetLike(Protocol):
    """The part of a dataset that a network is fitted to."""

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
    """A network with fresh weights, fitted to the images and classes of the dataset `like`.

    What is given beside `like` goes before it; with neither, images are 3×32×32 of 10 classes. Mean and
    standard deviation are of pixels in [0,1]; where none is given, nor known for that number of channels,
    images pass unnormalised. Weights are drawn from `generator`, and the global one is then not touched;
    without it they are drawn from the global one, as by any `nn.Module`.
    """
    if like is not None:
        shape = tuple(like.images.shape)
        if len(shape) != 4 or shape[2] != shape[3]:
            raise ConfigurationError(f"like: images of shape {shape}; (N, channels, side, side) is accepted")
        channels = shape[1] if channels is None else channels
        side = shape[2] if side is None else side
        classes = len(like.classes) if classes is None else classes
        if channels == shape[1]:
            mean = like.mean if mean is None else mean
            std = like.std if std is None else std
    channels = check_size("channels", 3 if channels is None else channels)
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
    initialise(network, generator)
    return network


def outline(architecture: Architecture) -> Network:
    """The network with its weights on the meta device: shapes and counts that cost no memory or time."""
    check(architecture)
    with torch.device("meta"):
        body = NETWORKS[architecture.name](architecture.channels, architecture.side)
    network = Network(architecture, body)
    count = sum(parameter.numel() for parameter in network.parameters())
    if count > MOST_PARAMETERS:
        raise ConfigurationError(f"{architecture}: {count:,} weights, more than {MOST_PARAMETERS:,}")
    return network


def check(architecture: Architecture) -> None:
    """Raise a `ConfigurationError` for a network that cannot be built."""
    if architecture.name not in NETWORKS:
        raise ConfigurationError(
            f"name = {architecture.name!r}: unknown network; known are {', '.join(NETWORKS)}"
        )
    check_size("channels", architecture.channels)
    check_size("side", architecture.side, least=SMALLEST_SIDE)
    check_size("classes", architecture.classes)
    for field in ("mean", "std"):
        values = getattr(architecture, field)
        if len(values) != architecture.channels:
            raise ConfigurationError(
                f"{field}: {len(values)} values for {architecture.channels} channels; one each is accepted"
            )
        if not all(math.isfinite(value) for value in values):
            raise ConfigurationError(f"{field} = {values}: finite numbers are accepted")
    if min(architecture.std) <= 0:
        raise ConfigurationError(f"std = {architecture.std}: numbers above 0 are accepted")


def check_size(field: str, value: int, least: int = 1) -> int:
    """`value`, when it is a believable size."""
    if not least <= value <= LARGEST:
        raise ConfigurationError(f"{field} = {value}: a whole number from {least} to {LARGEST} is accepted")
    return value
