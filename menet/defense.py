"""ME-Net (Algorithm 1 of the paper): drop pixels, estimate the image from those left, classify the estimate."""

from dataclasses import asdict
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from menet import images as pictures
from menet import masks as masking
from menet.errors import ConfigurationError
from menet.estimators import Estimator, NuclearNorm, build, name_of
from menet.preprocessed import Gradient, Preprocessed


class MENet(Preprocessed):
    """`classifier` behind matrix estimation.

    `p=(a, b)` with `masks=n` is the paper's schedule p: a→b of n observation probabilities; one number is a
    constant. While training, each image draws its probability from the schedule; in evaluation all use the
    schedule's mean. `channels="joint"` reads an image as one matrix [R G B] whose entries are masked
    independently, `"separate"` masks whole pixels and estimates each channel alone. A tensor estimator sees all
    channels either way; there `channels` says only whether entries or pixels are masked.
    """

    name: ClassVar[str] = "me-net"

    def __init__(
        self,
        classifier: nn.Module,
        estimator: Estimator | None = None,
        p: float | tuple[float, float] = (0.4, 0.6),
        masks: int = 10,
        channels: pictures.Channels = "joint",
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        self.estimator: Estimator = NuclearNorm() if estimator is None else estimator
        low, high = p if isinstance(p, tuple) else (p, p)
        if not 0 <= low <= high <= 1:
            raise ConfigurationError(f"p is {p}; accepted are a probability, or two with 0 ≤ a ≤ b ≤ 1")
        if masks < 1:
            raise ConfigurationError(f"masks is {masks}; accepted are whole numbers from 1")
        if channels not in ("joint", "separate"):
            raise ConfigurationError(f"channels is {channels!r}; accepted are 'joint' and 'separate'")
        self.p, self.masks, self.channels = p, masks, channels
        self.schedule = masking.schedule(low, high, masks)
        self.mean_p = sum(self.schedule) / masks

    def forward(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "b classes"]:
        """Logits under `mask`, or under one fresh mask per image."""
        if mask is None:
            return super().forward(images)
        return self.classifier(self.under(mask).reconstruct(images))

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        return self.estimate(images, self.sample_mask(images, generator))

    def sample_mask(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        """One mask per image: by the schedule while training, by its mean in evaluation."""
        count, shape = len(images), self.mask_shape(images)
        if not self.training:
            return masking.bernoulli((count, *shape), self.mean_p, generator, images.device)
        part, parts = self.share
        chosen = torch.randint(len(self.schedule), (parts * count,), generator=generator)
        drawn = masking.bernoulli((parts * count, *shape), torch.tensor(self.schedule)[chosen], generator)
        return drawn[part * count : (part + 1) * count].to(images.device)

    def mask_shape(self, images: Float[Tensor, "b c h w"]) -> tuple[int, ...]:
        """The shape of one image's mask: of its matrix, or of its pixels where channels share a mask."""
        _, c, h, w = images.shape
        if self.channels == "separate":
            return (1, h, w)
        return (c, h, w) if self._wants_channels else (h, c * w)

    def estimate(self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."]) -> Float[Tensor, "b c h w"]:
        """The images re-estimated from the entries where `mask` is True; it is per image or shared by all."""
        layout: pictures.Channels = "separate" if self._wants_channels else self.channels
        matrices = pictures.to_matrix(images, layout)
        return pictures.to_image(self.estimator(matrices, mask), images.shape, layout)

    def under(self, mask: Bool[Tensor, "..."]) -> Preprocessed:
        """The same module with `mask` in place of fresh ones."""
        view = self.with_gradient(self.gradient)
        view.preprocess = lambda images, generator: self.estimate(images, mask)  # type: ignore[method-assign]
        return view

    def fixed(self, masks: int = 10, seed: int = 0) -> "FixedMasks":
        """A deterministic model: the mean logits over a public bank of masks drawn from `seed`."""
        return FixedMasks(self, masks, seed)

    @property
    def _wants_channels(self) -> bool:
        return getattr(self.estimator, "dimensions", 2) == 3

    def settings(self) -> dict[str, Any]:
        return {
            "estimator": {"name": name_of(self.estimator), **asdict(self.estimator)},  # type: ignore[call-overload]
            "p": list(self.p) if isinstance(self.p, tuple) else self.p,
            "masks": self.masks,
            "channels": self.channels,
            "gradient": self.gradient,
        }

    @classmethod
    def from_settings(cls, classifier: nn.Module, settings: dict[str, Any]) -> Preprocessed:
        chosen = dict(settings)
        if "estimator" in chosen:
            try:
                chosen["estimator"] = build(**chosen["estimator"])
            except (TypeError, ValueError) as error:
                raise ConfigurationError(f"the defense's estimator cannot be built: {error}") from error
        if isinstance(chosen.get("p"), list):
            chosen["p"] = tuple(chosen["p"])
        return super().from_settings(classifier, chosen)


class FixedMasks(nn.Module):
    """A `MENet` made deterministic by a public bank of masks: the mean logits over all of them.

    Every image is seen through the same masks, so attacks and benchmarks for deterministic models apply. What an
    attack breaks here says nothing of fresh masks: score on those too.
    """

    def __init__(self, model: MENet, masks: int = 10, seed: int = 0) -> None:
        super().__init__()
        if masks < 1:
            raise ConfigurationError(f"masks is {masks}; accepted are whole numbers from 1")
        self.model, self.masks, self.seed = model, masks, seed

    def bank(self, images: Float[Tensor, "b c h w"]) -> Bool[Tensor, "masks ..."]:
        """The masks, the same for every call and device."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.model.mask_shape(images)
        return masking.bank(self.masks, shape, self.model.mean_p, generator, images.device)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        return torch.stack([self.model(images, mask) for mask in self.bank(images)]).mean(0)
