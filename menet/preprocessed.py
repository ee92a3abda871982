"""A classifier behind a preprocessing step: what ME-Net and the baselines share."""

import copy
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.errors import CheckpointError, ConfigurationError, MenetError
from menet.linalg import no_autocast
from menet.models import Network, weights

Gradient = Literal["exact", "bpda"]
Average = Literal["logits", "probabilities"]

RANGE_TOLERANCE = 1e-4
"""How far rounding may carry a pixel beyond [0, 1]."""


class Preprocessed(nn.Module):
    """A random or deterministic preprocessing step, then a classifier; a subclass defines `preprocess`.

    Images are `(b, c, h, w)` with pixels in [0, 1]. `gradient` is how gradients pass the preprocessing: `exact`
    differentiates it, `bpda` (backward pass differentiable approximation, Athalye et al. 2018) replaces its
    derivative by that of `surrogate`, which is the identity unless a defense defines another.

    Randomness comes from the module's own `generator`, on the CPU so that a seed means the same on every device.
    `seed=None` seeds it from the operating system. It is not part of `state_dict`: two models loaded from one
    file must not replay each other's draws.

    `shard=(i, n)` means that the images seen in training are shard i of n equal shards of one batch: the module
    then draws for the whole batch and uses its shard, so that n processes see what one would have seen.
    """

    name: ClassVar[str]
    kinds: ClassVar[dict[str, type["Preprocessed"]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            Preprocessed.kinds[cls.name] = cls

    def __init__(self, classifier: nn.Module, gradient: Gradient = "bpda", seed: int | None = 0) -> None:
        super().__init__()
        self.classifier = classifier
        self.gradient: Gradient = _checked_gradient(gradient)
        self.generator = torch.Generator()
        self.reseed(seed)
        self.shard: tuple[int, int] = (0, 1)
        self._range_checked = False

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits for one fresh draw of the preprocessing per image."""
        return self.classifier(self.reconstruct(images))

    def reconstruct(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator | None = None, **drawn: Tensor | None
    ) -> Tensor:
        """The preprocessed images, with gradients passing as `gradient` says.

        `drawn` is randomness drawn beforehand that `preprocess` is to use, such as the `mask` of a `MENet`.
        `torch.compile` leaves this step as it is: its loops and its randomness are not for a graph.
        """
        if torch.compiler.is_compiling():
            # Not a decorator, which would load the compiler, 1.6 seconds, for everyone who never compiles.
            return torch.compiler.disable(self._reconstruct)(images, generator, **drawn)
        return self._reconstruct(images, generator, **drawn)

    def _reconstruct(self, images: Tensor, generator: torch.Generator | None, **drawn: Tensor | None) -> Tensor:
        self._check_images(images)
        generator = self.generator if generator is None else generator
        # Half precision and autocast are for the classifier; a preprocessing step needs more than 8 bits.
        precise = images.float() if images.dtype in (torch.float16, torch.bfloat16) else images

        def step(images: Tensor) -> Tensor:
            return self.preprocess(images, generator, **drawn)

        if self.gradient == "exact" or not (images.requires_grad and torch.is_grad_enabled()):
            return self._outside_autocast(step, precise).to(images.dtype)
        with torch.no_grad():
            seen = self._outside_autocast(step, precise)
        # BPDA: the value is that of the preprocessing, the derivative that of the surrogate.
        surrogate = self._outside_autocast(self.surrogate, precise)
        return (surrogate + (seen - surrogate).detach()).to(images.dtype)

    def preprocess(self, images: Float[Tensor, "b c h w"], generator: torch.Generator) -> Tensor:
        """What the classifier sees of `images`; differentiable where `gradient="exact"` is to be of use."""
        raise TypeError(f"{type(self).__name__} does not define `preprocess`")

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Tensor:
        """The differentiable stand-in whose derivative `bpda` uses; by default the identity."""
        return images

    def visible(self, seen: Tensor) -> Float[Tensor, "b c h w"]:
        """What the classifier sees, as images to look at."""
        return seen

    @classmethod
    def classifier_channels(cls, channels: int, settings: dict[str, Any]) -> int:
        """How many channels the classifier receives for images of `channels`, given these `settings()`."""
        return channels

    def fit(self, images: Any, generator: torch.Generator) -> "Preprocessed":
        """Fit the preprocessing to training images, for defenses that learn from them.

        `images` is a tensor `(n, c, h, w)` with pixels in [0, 1], or of bytes as datasets store them.
        """
        return self

    def draw(self, sampler: Callable[[int], Tensor], count: int) -> Tensor:
        """`sampler(count)`; in training on a shard of a batch, this shard's part of a draw for all of it."""
        shard, shards = self.shard if self.training else (0, 1)
        return sampler(shards * count)[shard * count : (shard + 1) * count]

    def settings(self) -> dict[str, Any]:
        """Everything that `rebuild` needs besides the classifier, as plain JSON values."""
        raise TypeError(f"{type(self).__name__} does not define `settings`")

    @classmethod
    def from_settings(cls, classifier: nn.Module, settings: dict[str, Any]) -> "Preprocessed":
        """The module with these `settings()`; what they leave out has its default."""
        accepted = inspect.signature(cls).parameters.keys() - {"classifier"}
        unknown = sorted(settings.keys() - accepted)
        if unknown:
            names = ", ".join(sorted(accepted))
            raise ConfigurationError(f"unknown setting {unknown[0]!r} of {cls.name}; choose from {names}")
        return cls(classifier, **settings)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b features"]:
        """The classifier's penultimate activations for one fresh draw per image."""
        vectors: Tensor = self.classifier.features(self.reconstruct(images))  # type: ignore[operator]
        return vectors

    def sample(self, images: Float[Tensor, "b c h w"], draws: int = 10) -> Float[Tensor, "draws b classes"]:
        """Logits of independent draws of the preprocessing for each image, in evaluation mode.

        Whatever is in training mode is so again afterwards.
        """
        if draws < 1:
            raise ConfigurationError(f"expected draws >= 1, got {draws}")
        with evaluation_mode(self):
            return torch.stack([self(images) for _ in range(draws)])

    def votes(self, images: Float[Tensor, "b c h w"], draws: int = 10) -> Int[Tensor, "b classes"]:
        """How many of `draws` draws predict each class."""
        logits = require_numbers(self.sample(images, draws))
        chosen = logits.argmax(-1)
        return torch.stack([(chosen == label).sum(0) for label in range(logits.shape[-1])], dim=-1)

    def vote(self, images: Float[Tensor, "b c h w"], draws: int = 10) -> Int[Tensor, " b"]:
        """The majority vote over `draws` draws; ties go to the lower class, and NaN logits are an error."""
        return self.votes(images, draws).argmax(-1)

    def average(
        self, images: Float[Tensor, "b c h w"], draws: int = 10, of: Average = "logits"
    ) -> Float[Tensor, "b classes"]:
        """The mean of the logits over `draws` draws, or the logarithm of the mean of the probabilities."""
        if of not in get_args(Average):
            raise ConfigurationError(f"unknown average of {of!r}; choose from {', '.join(get_args(Average))}")
        logits = self.sample(images, draws)
        return logits.mean(0) if of == "logits" else logits.softmax(-1).mean(0).log()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and the settings of the defense to a safetensors file; any classifier will do.

        A digest of both is verified when the file is read. With one of this package's networks the file is enough
        for `menet.load`. The code of any other is not in it: build both again and call `load`.
        """
        network = self.classifier
        known = {"architecture": weights.describe(network)} if isinstance(network, Network) else {}
        state = self.state_dict()
        weights.save(path, state, weights.with_digest(state, {"defense": describe(self), **known}))

    def load(self, path: str | os.PathLike[str]) -> "Preprocessed":
        """Fill the module with the weights that `save` or a training run wrote; refuse those of another defense.

        Only how gradients pass may differ. To put the weights behind another defense on purpose, load them here
        into the one they were trained with, and give its `classifier` to the other.
        """
        state, header = weights.load_verified(path)
        difference = _difference(header.get("defense") or {}, describe(self))
        if difference:
            raise CheckpointError(
                f"{path} holds weights trained behind another defense: {difference}; "
                "build the defense with those settings"
            )
        found = weights.difference(self.state_dict(), state)
        if found:
            raise CheckpointError(f"{path} does not fit the classifier: {found}")
        self.load_state_dict(state)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Beside the tensors, where torch keeps each module's version: no tensor of its own, and it is pickled.
        metadata, described = getattr(destination, "_metadata", None), self._described()
        if metadata is not None and described is not None:
            metadata[prefix[:-1]]["defense"] = described

    def _described(self) -> dict[str, Any] | None:
        try:
            return describe(self)
        except (ConfigurationError, TypeError):
            return None  # a defense or estimator without a name can be used, but not described

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        saved, mine = local_metadata.get("defense"), self._described()
        difference = _difference(saved, mine) if isinstance(saved, dict) and mine is not None else None
        if difference:
            warnings.warn(
                f"these weights were trained behind another defense: {difference}; "
                "build the defense with those settings",
                stacklevel=5,
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def reseed(self, seed: int | None) -> "Preprocessed":
        """Restart the module's randomness from `seed`; None takes a seed from the operating system."""
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        return self

    def with_gradient(self, gradient: Gradient) -> "Preprocessed":
        """The same module with shared weights and generator, and another way for gradients to pass."""
        view = copy.copy(self)
        view._modules = dict(self._modules)
        # The copy has a generator of its own in the same state: it would replay the draws of the original.
        view.generator = self.generator
        view.gradient = _checked_gradient(gradient)
        return view

    def _outside_autocast(self, step: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """`step(images)`, forward and backward; gradients also reach parameters of the preprocessing."""
        parts = [child for name, child in self.named_children() if name != "classifier"]
        learned = [*self.parameters(recurse=False), *(weight for part in parts for weight in part.parameters())]
        return no_autocast(lambda images, *learned: step(images))(images, *learned)

    def _check_images(self, images: Tensor) -> None:
        if not isinstance(images, Tensor):
            raise ConfigurationError(
                f"expected images as a tensor, got a {type(images).__name__}; use torch.as_tensor for an array"
            )
        if images.ndim != 4:
            remedy = "; add a batch dimension: images[None]" if images.ndim == 3 else ""
            raise ConfigurationError(
                f"expected images (batch, channels, height, width), got shape {tuple(images.shape)}{remedy}"
            )
        if not images.dtype.is_floating_point:
            raise ConfigurationError(f"expected float images in [0, 1], got {images.dtype}; divide by 255")
        # Fake tensors and those on the meta device have no values. On an accelerator reading a value waits for
        # the device, so there only the first batch is checked.
        valued = type(images) in (Tensor, nn.Parameter) and not images.is_meta and images.numel() > 0
        if not valued or (self._range_checked and images.device.type != "cpu"):
            return
        low, high = (float(end) for end in images.detach().aminmax())
        if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):
            raise ConfigurationError(
                f"expected pixels in [0, 1], got values from {low:g} to {high:g}; "
                "pass raw images and put normalization inside the classifier"
            )
        self._range_checked = True

    def __getstate__(self) -> dict[str, Any]:
        # A generator cannot be copied or pickled, but its state can.
        return {**self.__dict__, "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "generator": torch.Generator().set_state(state["generator"])})


@contextmanager
def evaluation_mode(*models: Any) -> Iterator[None]:
    """Put models in evaluation mode; on leaving, every module is back in the mode it was in.

    Meanwhile the convolutions of models on a CPU are laid out channels last, whatever the layout of the images: a
    forward pass of a small network then takes down to half the time, and one of a large network not more.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    modes = [(module, module.training) for model in modules for module in model.modules()]
    kernels = [
        module.weight
        for module, _ in modes
        if isinstance(module, nn.Conv2d)
        and module.weight.device.type == "cpu"
        and not module.weight.is_contiguous(memory_format=torch.channels_last)
    ]
    try:
        for model in modules:
            model.eval()
        for kernel in kernels:
            kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for kernel in kernels:
            kernel.data = kernel.data.contiguous()


@contextmanager
def in_bfloat16(*models: Any) -> Iterator[None]:
    """Meanwhile the networks of models compute in bfloat16 and return float32; preprocessing stays as it is.

    On a processor with instructions for it, twice as fast; on others slower.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    modules += [model.classifier for model in modules if isinstance(model, Preprocessed)]
    devices = {weight.device.type for module in modules for weight in module.parameters()}
    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_hook(lambda module, given, logits: logits.float())
            stack.callback(hook.remove)
        for kind in devices or {"cpu"}:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        yield


def require_numbers(logits: Float[Tensor, "draws b classes"]) -> Float[Tensor, "draws b classes"]:
    """`logits`, unless some are NaN: the largest of those would be called a prediction."""
    wrong = logits.isnan().any(-1).any(0)
    if bool(wrong.any()):
        raise MenetError(f"the model returned NaN logits for image {int(wrong.nonzero()[0])}")
    return logits


def describe(module: nn.Module) -> dict[str, Any]:
    """The defense around a network as a checkpoint stores it; empty for an undefended network."""
    if not isinstance(module, Preprocessed):
        return {}
    return {"name": module.name, **module.settings()}


def _difference(saved: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """The first setting in which two described defenses differ, but for how gradients pass; None if none does."""
    for name in [*saved, *(name for name in mine if name not in saved)]:
        if name != "gradient" and saved.get(name) != mine.get(name):
            return f"expected {name} {saved.get(name)!r:.200}, got {mine.get(name)!r:.200}"
    return None


def rebuild(classifier: nn.Module, described: dict[str, Any], seed: int | None = 0) -> nn.Module:
    """`classifier` behind the defense that `describe` described, its randomness started from `seed`."""
    if not described:
        return classifier
    kind, settings = _kind_and_settings(described)
    module = kind.from_settings(classifier, settings)
    return module if "seed" in settings else module.reseed(seed)


def classifier_channels(channels: int, described: dict[str, Any]) -> int:
    """How many channels a classifier behind the defense `described` receives for images of `channels`."""
    if not described:
        return channels
    kind, settings = _kind_and_settings(described)
    return kind.classifier_channels(channels, settings)


def _kind_and_settings(described: dict[str, Any]) -> tuple[type[Preprocessed], dict[str, Any]]:
    settings = dict(described)
    name = settings.pop("name", None)
    if name not in Preprocessed.kinds:
        # Defenses register when their module is imported; nothing here may import them at its own import.
        for module in ("menet.defense", "menet.baselines"):
            importlib.import_module(module)
    if name not in Preprocessed.kinds:
        known = ", ".join(sorted(Preprocessed.kinds))
        raise ConfigurationError(f"unknown defense {name!r}; choose from {known}")
    return Preprocessed.kinds[name], settings


def _checked_gradient(gradient: Gradient) -> Gradient:
    if gradient not in get_args(Gradient):
        raise ConfigurationError(f"unknown gradient {gradient!r}; choose from {', '.join(get_args(Gradient))}")
    return gradient
