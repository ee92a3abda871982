"""ME-Net (Algorithm 1 of the paper): mask an image at random, reconstruct it, classify the reconstruction."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from menet import masks as masking
from menet.errors import ConfigurationError
from menet.estimators import Estimator, NuclearNorm, build, name_of
from menet.images import Channels, join_channels, to_image, to_matrix
from menet.preprocessed import Gradient, Preprocessed

MAX_MASKS = 10_000
"""Of a schedule, which is held in memory; the paper uses 10."""


class MENet(Preprocessed):
    """`classifier` behind matrix estimation.

    `estimator` is an estimator or its name, by default nuclear-norm minimization as in the paper. `p=(a, b)`
    with `masks=n` is the paper's schedule p: a→b of n observation probabilities; one number is a constant. In
    training each image draws its probability from the schedule; in evaluation all use the schedule's mean.
    `channels="joint"` takes an image as one matrix [R G B] whose entries are masked independently, `"separate"`
    masks whole pixels and estimates each channel alone. The tubal estimator sees all channels either way; there
    `channels` only decides whether entries or pixels are masked. With `bank` (a seed) each training image has
    `masks` fixed masks of its own instead of fresh ones, as a prepared set has; training sets `examples` to the
    positions of a batch's images. `gradient` and `seed` are described in `Preprocessed`.
    """

    name: ClassVar[str] = "me-net"

    def __init__(
        self,
        classifier: nn.Module,
        estimator: Estimator | str | None = None,
        p: float | Sequence[float] = (0.4, 0.6),
        masks: int = 10,
        channels: Channels = "joint",
        gradient: Gradient = "bpda",
        seed: int | None = 0,
        bank: int | None = None,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 1 <= masks <= MAX_MASKS:
            raise ConfigurationError(f"expected 1 <= masks <= {MAX_MASKS:,}, got {masks}")
        if channels not in get_args(Channels):
            raise ConfigurationError(f"unknown channels {channels!r}; choose from joint, separate")
        self.estimator = _estimator(estimator)
        self.p, low, high = _probabilities(p)
        self.masks, self.channels, self.bank = masks, channels, bank
        self.examples: Int[Tensor, " n"] | None = None
        self.schedule = masking.schedule(low, high, masks)
        self.mean_p = sum(self.schedule) / masks

    def forward(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "b classes"]:
        """Logits under `mask`, or under one fresh mask per image."""
        return self.classifier(self.reconstruct(images, mask=mask))

    def preprocess(
        self,
        images: Float[Tensor, "b c h w"],
        generator: torch.Generator,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "b c h w"]:
        """Mask and reconstruct. `reconstruct` calls this, with gradients passing as `gradient` says."""
        return self.estimate(images, self.sample_mask(images, generator) if mask is None else mask)

    def sample_mask(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Bool[Tensor, "b ..."]:
        """One mask per image, with a probability from the schedule in training, with its mean in evaluation."""
        count, shape = len(images), self.mask_shape(images)
        if not self.training:
            return masking.bernoulli((count, *shape), self.mean_p, generator, images.device)
        shard, shards = self.shard
        chosen = torch.randint(len(self.schedule), (shards * count,), generator=generator)
        if self.bank is not None and self.examples is not None:
            # An attack in expectation repeats the whole batch for each draw.
            examples = self.examples.cpu().repeat(count // len(self.examples))
            chosen = chosen[shard * count : (shard + 1) * count]
            p = torch.tensor(self.schedule)[chosen]
            return masking.of_examples(examples, chosen, p, shape, self.bank).to(images.device)
        drawn = masking.bernoulli((shards * count, *shape), torch.tensor(self.schedule)[chosen], generator)
        return drawn[shard * count : (shard + 1) * count].to(images.device)

    def mask_shape(self, images: Float[Tensor, "b c h w"]) -> tuple[int, ...]:
        """The shape of one image's mask: that of its matrix, or of its pixels where channels share a mask."""
        _, c, h, w = images.shape
        if self.channels == "separate":
            return (1, h, w)
        return (h, c * w) if self._layout == "joint" else (c, h, w)

    def estimate(self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."]) -> Float[Tensor, "b c h w"]:
        """The images reconstructed from the entries where `mask` is True.

        `mask` has the shape of `mask_shape`, per image or shared by all, or that of the images.
        """
        if self._layout == "joint" and mask.ndim == images.ndim:
            mask = join_channels(mask)
        matrices = to_matrix(images, self._layout)
        return to_image(self.estimator(matrices, mask), images.shape, self._layout)

    @property
    def _layout(self) -> Channels:
        """How the estimator takes an image; a tensor estimator takes its channels as they are."""
        return "separate" if getattr(self.estimator, "dimensions", 2) == 3 else self.channels

    def fixed(self, draws: int = 10, seed: int = 0) -> "FixedMasks":
        """A deterministic model: the mean logits over a public bank of `draws` masks drawn from `seed`."""
        return FixedMasks(self, draws, seed)

    def settings(self) -> dict[str, Any]:
        return {
            "estimator": {"name": name_of(self.estimator), **asdict(self.estimator)},  # type: ignore[call-overload]
            "p": list(self.p) if isinstance(self.p, tuple) else self.p,
            "masks": self.masks,
            "channels": self.channels,
            "gradient": self.gradient,
            **({} if self.bank is None else {"bank": self.bank}),
        }

    @classmethod
    def from_settings(cls, classifier: nn.Module, settings: dict[str, Any]) -> Preprocessed:
        chosen = dict(settings)
        if isinstance(chosen.get("estimator"), dict):
            try:
                chosen["estimator"] = build(**chosen["estimator"])
            except (TypeError, ValueError) as error:
                raise ConfigurationError(f"cannot build the estimator of the defense: {error}") from error
        return super().from_settings(classifier, chosen)


class FixedMasks(nn.Module):
    """A `MENet` made deterministic by a public bank of masks: the mean logits over all of them.

    Every image is seen through the same masks, so attacks and benchmarks for deterministic models apply.
    Robustness with a fixed bank says nothing about fresh masks: evaluate both.
    """

    def __init__(self, model: MENet, draws: int = 10, seed: int = 0) -> None:
        super().__init__()
        if draws < 1:
            raise ConfigurationError(f"expected draws >= 1, got {draws}")
        self.model, self.draws, self.seed = model, draws, seed

    def bank(self, images: Float[Tensor, "b c h w"]) -> Bool[Tensor, "draws ..."]:
        """The masks, the same for every call and device."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.model.mask_shape(images)
        return masking.bank(self.draws, shape, self.model.mean_p, generator, images.device)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        return torch.stack([self.model(images, mask) for mask in self.bank(images)]).mean(0)


def _estimator(given: Estimator | str | None) -> Estimator:
    if given is None:
        return NuclearNorm()
    if isinstance(given, str):
        return build(given)
    if isinstance(given, type):
        raise ConfigurationError(
            f"expected an estimator, got the class {given.__name__}; create one: {given.__name__}()"
        )
    if not callable(given):
        raise ConfigurationError(f"expected an estimator or its name, got {given!r}")
    return given


def _probabilities(p: float | Sequence[float]) -> tuple[float | tuple[float, float], float, float]:
    """`p` as a number or a pair, and the two ends of its schedule."""
    match p:
        case (float() | int() as low, float() | int() as high):
            kept: float | tuple[float, float] = (low, high)
        case float() | int() as low:
            kept = high = low
        case _:
            low = high = math.nan
    if not 0 <= low <= high <= 1:
        raise ConfigurationError(f"expected p in [0, 1], or (a, b) with 0 <= a <= b <= 1, got {p}")
    return kept, low, high
