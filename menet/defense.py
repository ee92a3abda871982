"""ME-Net (Algorithm 1 of the paper): mask an image at random, reconstruct it, classify the reconstruction."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from menet import masks as masking
from menet.errors import ConfigurationError
from menet.estimators import Estimator, MaskOnly, NuclearNorm, build, name_of
from menet.images import Channels, join_channels, split_channels, to_image, to_matrix
from menet.preprocessed import Gradient, Preprocessed

MaskOver = Literal["entries", "pixels", "cells"]
Encoding = Literal["estimate", "ablation", "estimate+mask"]

MAX_MASKS = 10_000
"""Of a schedule, which is held in memory; the paper uses 10."""


class MENet(Preprocessed):
    """`classifier` behind matrix estimation.

    `estimator` is an estimator or its name, by default nuclear-norm minimization as in the paper. `p=(a, b)`
    with `masks=n` is the paper's schedule p: a→b of n observation probabilities; one number is a constant. In
    training each image draws its probability from the schedule; in evaluation all use the schedule's mean.
    `channels="joint"` takes an image as one matrix [R G B], `"separate"` estimates each channel alone; the tubal
    estimator sees all channels either way. `mask="entries"` masks the channels of a pixel independently,
    `"pixels"` hides or shows all of them together, for which certificates are C times as large; by default
    entries with joint and pixels with separate channels, as in the paper. `"cells"` shows one cell of a random
    partition into 1/p cells, spread evenly (`masks.partitions`), for certificates by partitions.

    `encoding` is what the classifier sees: the `"estimate"`; `"ablation"`, each channel x as x and 1 − x where
    observed and two zeros elsewhere, so that an absent pixel differs from a black one (Levine & Feizi 2020), with
    no estimate at all; or `"estimate+mask"`, the estimate and as many channels that are 1 where observed. The
    latter two give the classifier twice the channels of the image.

    With `bank` (a seed) each training image has `masks` fixed masks of its own instead of fresh ones, as a
    prepared set has; training sets `examples` to the positions of a batch's images. `gradient` and `seed` are
    described in `Preprocessed`.
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
        mask: MaskOver | None = None,
        encoding: Encoding = "estimate",
        bank: int | None = None,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        if not 1 <= masks <= MAX_MASKS:
            raise ConfigurationError(f"expected 1 <= masks <= {MAX_MASKS:,}, got {masks}")
        if channels not in get_args(Channels):
            raise ConfigurationError(f"unknown channels {channels!r}; choose from joint, separate")
        if mask is not None and mask not in get_args(MaskOver):
            raise ConfigurationError(f"unknown mask {mask!r}; choose from {', '.join(get_args(MaskOver))}")
        if encoding not in get_args(Encoding):
            raise ConfigurationError(
                f"unknown encoding {encoding!r}; choose from {', '.join(get_args(Encoding))}"
            )
        self.mask: MaskOver = mask or _mask_of(channels)
        self.encoding: Encoding = encoding
        self.estimator = _estimator(MaskOnly() if estimator is None and encoding == "ablation" else estimator)
        if encoding == "ablation" and not isinstance(self.estimator, MaskOnly):
            raise ConfigurationError(
                f"expected no estimator with encoding 'ablation', which shows observed pixels as they are, "
                f"got {self.estimator!r}; leave it out, or use encoding 'estimate+mask'"
            )
        self.p, low, high = _probabilities(p)
        self.masks, self.channels, self.bank = masks, channels, bank
        self.examples: Int[Tensor, " n"] | None = None
        self.schedule = masking.schedule(low, high, masks)
        self.mean_p = sum(self.schedule) / masks
        if self.mask == "cells" and bank is not None:
            raise ConfigurationError(
                f"expected no bank with mask 'cells', got {bank}: its masks are of other kinds"
            )
        if self.mask == "cells" and low <= 0:
            raise ConfigurationError(f"expected p > 0 with mask 'cells', got {p}")

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
    ) -> Float[Tensor, "b codes h w"]:
        """Mask, reconstruct and encode. `reconstruct` calls this, with gradients passing as `gradient` says."""
        mask = self.sample_mask(images, generator) if mask is None else mask
        if self.encoding == "estimate":
            return self.estimate(images, mask)
        observed = self._over_channels(images, mask)
        if self.encoding == "ablation":
            # `where` and not a product: what is hidden must not pass, not even NaN.
            zero = torch.zeros((), dtype=images.dtype, device=images.device)
            return torch.cat([torch.where(observed, images, zero), torch.where(observed, 1 - images, zero)], 1)
        return torch.cat([self.estimate(images, mask), observed.to(images.dtype)], 1)

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Tensor:
        """The image itself in place of its estimate, and every pixel observed."""
        if self.encoding == "estimate":
            return images
        return torch.cat([images, 1 - images if self.encoding == "ablation" else torch.ones_like(images)], 1)

    def visible(self, seen: Tensor) -> Float[Tensor, "b c h w"]:
        """Estimates; of an ablation the observed pixels, with mid-gray in place of the others."""
        if self.encoding == "estimate":
            return seen
        first, second = seen.chunk(2, 1)
        return (first + 1 - second) / 2 if self.encoding == "ablation" else first

    @classmethod
    def classifier_channels(cls, channels: int, settings: dict[str, Any]) -> int:
        return channels if settings.get("encoding", "estimate") == "estimate" else 2 * channels

    def sample_mask(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Bool[Tensor, "b ..."]:
        """One mask per image, with a probability from the schedule in training, with its mean in evaluation."""
        count, shape = len(images), self.mask_shape(images)
        if not self.training:
            return self._draw(torch.full((count,), self.mean_p), shape, generator, images.device)
        shard, shards = self.shard
        chosen = torch.randint(len(self.schedule), (shards * count,), generator=generator)
        if self.bank is not None and self.examples is not None:
            # An attack in expectation repeats the whole batch for each draw.
            examples = self.examples.cpu().repeat(count // len(self.examples))
            chosen = chosen[shard * count : (shard + 1) * count]
            p = torch.tensor(self.schedule)[chosen]
            return masking.of_examples(examples, chosen, p, shape, self.bank).to(images.device)
        drawn = self._draw(torch.tensor(self.schedule)[chosen], shape, generator)
        return drawn[shard * count : (shard + 1) * count].to(images.device)

    def _draw(
        self,
        p: Float[Tensor, " b"],
        shape: tuple[int, ...],
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> Bool[Tensor, "b ..."]:
        if self.mask == "cells":
            return masking.random_cells(p, (shape[-2], shape[-1]), generator).to(device)
        return masking.bernoulli((len(p), *shape), p, generator, device)

    def mask_shape(self, images: Float[Tensor, "b c h w"]) -> tuple[int, ...]:
        """The shape of one image's mask: that of its matrix, or of its pixels where channels share a mask."""
        _, c, h, w = images.shape
        if self.mask != "entries":
            return (1, h, w)
        return (h, c * w) if self._layout == "joint" else (c, h, w)

    def estimate(self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."]) -> Float[Tensor, "b c h w"]:
        """The images reconstructed from the entries where `mask` is True.

        `mask` has the shape of `mask_shape`, per image or shared by all, or that of the images.
        """
        if self._layout == "joint" and (self.mask != "entries" or mask.ndim == images.ndim):
            mask = join_channels(self._over_channels(images, mask))
        matrices = to_matrix(images, self._layout)
        return to_image(self.estimator(matrices, mask), images.shape, self._layout)

    def _over_channels(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."]
    ) -> Bool[Tensor, "b c h w"]:
        """A mask in any shape that `estimate` takes, as one for the channels of the images."""
        if self._layout == "joint" and self.mask == "entries" and mask.ndim < images.ndim:
            mask = split_channels(mask, images.shape[1])
        try:
            return mask.expand(images.shape)
        except RuntimeError:
            raise ConfigurationError(
                f"expected a mask of shape {self.mask_shape(images)}, per image or shared by all, "
                f"got {tuple(mask.shape)}"
            ) from None

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
            # Written only where they differ from what files mean that are older than these two settings.
            **({} if self.mask == _mask_of(self.channels) else {"mask": self.mask}),
            **({} if self.encoding == "estimate" else {"encoding": self.encoding}),
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


def _mask_of(channels: Channels) -> MaskOver:
    return "pixels" if channels == "separate" else "entries"


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
