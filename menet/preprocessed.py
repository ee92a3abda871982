"""A classifier behind a preprocessing step: what the defense and the defenses it is compared with share."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.errors import ConfigurationError

Gradient = Literal["exact", "bpda"]
Average = Literal["logits", "probabilities"]


class Preprocessed(nn.Module):
    """Preprocess images, then classify them; a subclass says how in `preprocess`.

    Images are `(b, c, h, w)` on [0, 1]. Randomness comes from the module's own generator, on the CPU so that a
    seed means the same everywhere; it is part of `state_dict`. `gradient` says how gradients pass the
    preprocessing: `exact` differentiates it, `bpda` takes it for the identity (`surrogate` may say otherwise).

    `share=(i, n)` says that the images it sees while training are part i of n equal parts of one batch: it then
    draws for the whole batch and uses its part, so that n processes see what one would have seen.
    """

    name: ClassVar[str]
    kinds: ClassVar[dict[str, type["Preprocessed"]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            Preprocessed.kinds[cls.name] = cls

    def __init__(self, classifier: nn.Module, gradient: Gradient = "bpda", seed: int = 0) -> None:
        super().__init__()
        if gradient not in get_args(Gradient):
            raise ConfigurationError(f"gradient is {gradient!r}; accepted are 'exact' and 'bpda'")
        self.classifier = classifier
        self.gradient: Gradient = gradient
        self.generator = torch.Generator().manual_seed(seed)
        self.share: tuple[int, int] = (0, 1)

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        """What the classifier is to see of `images`; differentiable where `gradient="exact"` is supported."""
        raise TypeError(f"{type(self).__name__} does not say how it preprocesses")

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Tensor:
        """What the preprocessing is taken for on the backward pass under `bpda`; by default the identity."""
        return images

    def visible(self, seen: Tensor) -> Float[Tensor, "b c h w"]:
        """What the classifier sees, as images that people can look at."""
        return seen

    @classmethod
    def classifier_channels(cls, channels: int, settings: dict[str, Any]) -> int:
        """How many channels the classifier sees of images with `channels`; `settings` as for `from_settings`."""
        return channels

    def fit(self, images: Any, generator: torch.Generator) -> "Preprocessed":
        """Learn from training images what the preprocessing needs, where it needs something; then it is ready.

        `images` is a tensor `(n, c, h, w)` on [0, 1], or bytes as datasets hold them.
        """
        return self

    def draw(self, sampler: Callable[[int], Tensor], count: int) -> Tensor:
        """`sampler(count)`, of which each process that trains on part of a batch takes its part of the whole."""
        part, parts = self.share if self.training else (0, 1)
        return sampler(parts * count)[part * count : (part + 1) * count]

    def settings(self) -> dict[str, Any]:
        """Everything but the classifier that `rebuild` needs, as plain JSON values."""
        raise TypeError(f"{type(self).__name__} has no settings")

    @classmethod
    def from_settings(cls, classifier: nn.Module, settings: dict[str, Any]) -> "Preprocessed":
        """The module whose `settings()` these are; what they leave out has its default."""
        accepted = inspect.signature(cls).parameters.keys() - {"classifier"}
        unknown = sorted(settings.keys() - accepted)
        if unknown:
            names = ", ".join(sorted(accepted))
            raise ConfigurationError(f"{cls.name} has no setting {unknown[0]!r}; accepted are {names}")
        return cls(classifier, **settings)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of one fresh draw of the preprocessing per image."""
        return self.classifier(self.reconstruct(images))

    @torch.compiler.disable
    def reconstruct(self, images: Float[Tensor, "b c h w"], generator: torch.Generator | None = None) -> Tensor:
        """The preprocessed images, with gradients passing as `gradient` says."""
        generator = self.generator if generator is None else generator
        # Autocast is for the classifier: it would round the products of a preprocessing step to 8 bits.
        with torch.autocast(images.device.type, enabled=False):
            if self.gradient == "exact" or not (images.requires_grad and torch.is_grad_enabled()):
                return self.preprocess(images, generator)
            with torch.no_grad():
                seen = self.preprocess(images, generator)
            carrier = self.surrogate(images)
            return carrier + (seen - carrier).detach()

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b features"]:
        """The classifier's penultimate vectors for one fresh draw per image."""
        vectors: Tensor = self.classifier.features(self.reconstruct(images))  # type: ignore[operator]
        return vectors

    def draws(self, images: Float[Tensor, "b c h w"], masks: int = 10) -> Float[Tensor, "masks b classes"]:
        """Logits of `masks` independent draws for each image."""
        if masks < 1:
            raise ConfigurationError(f"masks is {masks}; accepted are whole numbers from 1")
        return torch.stack([self(images) for _ in range(masks)])

    def votes(self, images: Float[Tensor, "b c h w"], masks: int = 10) -> Int[Tensor, "b classes"]:
        """How many of `masks` draws choose each class."""
        logits = self.draws(images, masks)
        chosen = logits.argmax(-1)
        return torch.stack([(chosen == label).sum(0) for label in range(logits.shape[-1])], dim=-1)

    def vote(self, images: Float[Tensor, "b c h w"], masks: int = 10) -> Int[Tensor, " b"]:
        """The class most of `masks` draws choose; the lower class number where votes are equal."""
        return self.votes(images, masks).argmax(-1)

    def average(
        self, images: Float[Tensor, "b c h w"], masks: int = 10, of: Average = "logits"
    ) -> Float[Tensor, "b classes"]:
        """The mean over `masks` draws of the logits, or the logarithm of that of the probabilities."""
        if of not in get_args(Average):
            raise ConfigurationError(f"of is {of!r}; accepted are 'logits' and 'probabilities'")
        logits = self.draws(images, masks)
        return logits.mean(0) if of == "logits" else logits.softmax(-1).mean(0).log()

    def reseed(self, seed: int) -> "Preprocessed":
        """Start the module's randomness anew from `seed`."""
        self.generator.manual_seed(seed)
        return self

    def with_gradient(self, gradient: Gradient) -> "Preprocessed":
        """The same module, weights and generator shared, with another way for gradients to pass."""
        if gradient not in get_args(Gradient):
            raise ConfigurationError(f"gradient is {gradient!r}; accepted are 'exact' and 'bpda'")
        view = copy.copy(self)
        view._modules = dict(self._modules)
        # Copying gave it a generator of its own in the same state; two that replay each other's draws mislead.
        view.generator = self.generator
        view.gradient = gradient
        return view

    def get_extra_state(self) -> Tensor:
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.generator.set_state(state.cpu())

    def __getstate__(self) -> dict[str, Any]:
        # Generators cannot be copied or pickled; their states can.
        return {**self.__dict__, "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "generator": torch.Generator().set_state(state["generator"])})


def describe(module: nn.Module) -> dict[str, Any]:
    """What a checkpoint says of the defense around a network; empty for a bare network."""
    if not isinstance(module, Preprocessed):
        return {}
    return {"name": module.name, **module.settings()}


def rebuild(classifier: nn.Module, described: dict[str, Any]) -> nn.Module:
    """`classifier` behind the defense that `describe` described."""
    if not described:
        return classifier
    kind, settings = _kind_and_settings(described)
    return kind.from_settings(classifier, settings)


def classifier_channels(channels: int, described: dict[str, Any]) -> int:
    """How many channels a classifier must take that is to stand behind the defense `described`."""
    if not described:
        return channels
    kind, settings = _kind_and_settings(described)
    return kind.classifier_channels(channels, settings)


def _kind_and_settings(described: dict[str, Any]) -> tuple[type[Preprocessed], dict[str, Any]]:
    settings = dict(described)
    name = settings.pop("name", None)
    if name not in Preprocessed.kinds:
        known = ", ".join(sorted(Preprocessed.kinds))
        raise ConfigurationError(f"defense is {name!r}; accepted are {known}, or nothing for a bare network")
    return Preprocessed.kinds[name], settings
