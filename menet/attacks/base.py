"""What every attack has in common: how it is called, how it sees the model, and what it returns."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from menet.attacks.threat import ThreatModel
from menet.errors import AttackError, ConfigurationError

Model = Callable[[Tensor], Tensor]
"""Any callable from images (B,C,H,W) in [0,1] to logits (B,K)."""

RANDOM_DRAWS = 10

Images = Float[Tensor, "b c h w"]
Losses = Float[Tensor, " b"]


def wide(per_example: Tensor) -> Tensor:
    """A value per example (B,) in the shape (B,1,1,1), which broadcasts over images."""
    return per_example.view(-1, 1, 1, 1)


def default_draws(random: bool) -> int:
    """Draws behind each loss or gradient, unless an attack says otherwise."""
    return RANDOM_DRAWS if random else 1


class GradientWarning(UserWarning):
    """Gradients that give an attack no direction: examples that look robust may only be unattacked."""


@contextmanager
def frozen_batchnorm(model: Any) -> Iterator[bool]:
    """Batch normalization in evaluation mode, everything else in the mode it is in; whether that is a change.

    Otherwise the attack's iterates would enter the running statistics that the network is evaluated with.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [one for one in modules if isinstance(one, nn.modules.batchnorm._NormBase) and one.training]
    try:
        for layer in layers:
            layer.eval()
        yield bool(layers)
    finally:
        for layer in layers:
            layer.train()


def is_deterministic(model: Model, images: Images) -> bool:
    """Whether two calls of `model` on the same images give exactly the same logits."""
    with torch.no_grad():
        # Copies, since a model may work in place.
        return bool(torch.equal(model(images.clone()), model(images.clone())))


@dataclass(frozen=True, repr=False)
class AttackResult:
    """Adversarial images, one per example, and what finding them cost."""

    images: Float[Tensor, "b c h w"]
    queries: Int[Tensor, " b"]
    """Forward passes of the attacked model, per example."""
    gradients: Int[Tensor, " b"] | None = None
    """Backward passes, per example; None if not counted."""
    loss_history: Float[Tensor, "steps b"] | None = None
    """Mean loss at the start and after each step, if requested; with restarts, that of the selected one."""
    restarts: Float[Tensor, "restarts b c h w"] | None = None
    """The images of every restart, if there was more than one; `images` holds those with the highest loss."""
    failed: Bool[Tensor, " b"] | None = None
    """Examples for which the attack found no candidate and returned the original image."""
    unprojected: Float[Tensor, "b c h w"] | None = None
    """What a minimum-norm attack found, before it was projected into the threat model."""
    unusable_gradients: Bool[Tensor, " b"] | None = None
    """Examples whose gradient was NaN, infinite or exactly zero at every step; None if none was computed.

    A gradient that is zero because the loss has reached its upper limit does not count.
    """
    members: tuple[str, ...] | None = None
    """For an attack made of several: which of them found each image."""
    originals: Float[Tensor, "b c h w"] | None = None
    """The images that were attacked, not copied; every call of an attack sets them."""

    @property
    def candidates(self) -> Float[Tensor, "restarts b c h w"]:
        """The images of every restart, or the only ones."""
        return self.images[None] if self.restarts is None else self.restarts

    def __repr__(self) -> str:
        parts = [f"{len(self.images)} examples"]
        if len(self.images):
            if self.originals is not None:
                perturbation = (self.images - self.originals).flatten(1)
                for norm, order in (("linf", torch.inf), ("l2", 2)):
                    norms = perturbation.norm(order, dim=1)
                    parts.append(f"{norm} mean {float(norms.mean()):.4g} max {float(norms.max()):.4g}")
            for name in ("queries", "gradients"):
                counts = getattr(self, name)
                if counts is not None:
                    parts.append(f"{name} mean {float(counts.double().mean()):.4g} max {int(counts.max())}")
        for name in ("failed", "unusable_gradients"):
            flags = getattr(self, name)
            if flags is not None:
                parts.append(f"{name.replace('_', ' ')} {int(flags.sum())}")
        return f"AttackResult({', '.join(parts)})"


def unperturbed(images: Images) -> AttackResult:
    """The result that leaves every image as it is."""
    return AttackResult(
        images=images.clone(),
        queries=torch.zeros(len(images), dtype=torch.int64, device=images.device),
        failed=torch.zeros(len(images), dtype=torch.bool, device=images.device),
        originals=images.detach(),
    )


class Queries:
    """The model as an attack sees it: its logits are checked, and queries counted per example.

    The model is given copies of the images, so that one that works in place changes nobody else's.
    """

    def __init__(self, model: Model, labels: Tensor, targets: Tensor | None = None) -> None:
        self.model = model
        self.counts = torch.zeros(len(labels), dtype=torch.int64, device=labels.device)
        self.gradients = torch.zeros_like(self.counts)
        """Backward passes per example."""
        self.labels, self.targets = labels, targets
        self._checked_shape = False
        self._any_gradient = False
        self.nonfinite_gradients = torch.zeros_like(labels, dtype=torch.bool)
        """Examples with NaN or infinite components in any gradient so far."""
        self._usable = torch.zeros_like(labels, dtype=torch.bool)
        self._always_saturated = torch.ones_like(labels, dtype=torch.bool)

    def __call__(self, batch: Tensor, examples: slice | Tensor | None = None, draws: int = 1) -> Tensor:
        """Logits of `batch`: the images of `examples` (all of them if None), repeated `draws` times.

        The batch is ordered by draw: all examples once, then all of them again. Attacks of other libraries
        choose a part of the examples without saying which; such a call counts for every example, so that
        `counts` is then an upper bound.
        """
        logits = self.model(batch.clone())
        if not self._checked_shape:
            self._check_shape(logits, batch)
        self._check_nan(logits, examples, draws)
        self.counts[slice(None) if examples is None else examples] += draws
        return logits

    @property
    def unusable_gradients(self) -> Tensor | None:
        """See `AttackResult.unusable_gradients`."""
        return ~(self._usable | self._always_saturated) if self._any_gradient else None

    def checked_gradient(
        self,
        gradient: Tensor,
        logits: Tensor,
        logits_gradient: Tensor,
        examples: slice | Tensor | None = None,
        draws: int = 1,
    ) -> Tensor:
        """`gradient` with NaN replaced by 0, after noting which examples have a usable one.

        Arguments are ordered like the batch of `__call__`; `logits_gradient` is that of the loss with respect
        to the logits. Where a call does not say which examples it is about, one usable gradient counts for all.
        """
        self._any_gradient = True
        self.gradients[slice(None) if examples is None else examples] += draws
        finite = gradient.isfinite().flatten(1).all(1)
        usable = finite & (gradient != 0).flatten(1).any(1)
        index = slice(None) if examples is None else examples
        labels = self.labels[index].repeat(draws)
        if len(labels) == len(gradient):
            predicted = logits.argmax(1)
            fooled = (
                predicted != labels if self.targets is None else predicted == self.targets[index].repeat(draws)
            )
            saturated = finite & fooled & ~logits_gradient.flatten(1).any(1)
            self.nonfinite_gradients[index] |= ~finite.view(draws, -1).all(0)
            self._usable[index] |= usable.view(draws, -1).any(0)
            self._always_saturated[index] &= saturated.view(draws, -1).all(0)
        else:
            self.nonfinite_gradients |= ~finite.all()
            self._usable |= usable.any()
            self._always_saturated &= False
        # Infinite components keep their sign, at a size whose square and sums over draws are finite.
        large = torch.finfo(gradient.dtype).max ** 0.25
        return gradient.nan_to_num(nan=0.0, posinf=large, neginf=-large)

    def count(self, result: "AttackResult", examples: slice | Tensor = slice(None)) -> None:
        """Add the cost of another attack on some of the examples."""
        self.counts[examples] += result.queries
        if result.gradients is not None:
            self.gradients[examples] += result.gradients

    def _check_shape(self, logits: Tensor, batch: Tensor) -> None:
        if logits.ndim != 2 or len(logits) != len(batch) or not logits.is_floating_point():
            raise ConfigurationError(
                f"expected floating-point logits of shape ({len(batch)}, classes) from the model, "
                f"got {logits.dtype} of shape {tuple(logits.shape)}"
            )
        for name, classes in (("labels", self.labels), ("targets", self.targets)):
            if classes is not None and int(classes.max()) >= logits.shape[1]:
                raise ConfigurationError(
                    f"expected {name} from 0 to {logits.shape[1] - 1}, the classes of the model, "
                    f"got {int(classes.max())}"
                )
        self._checked_shape = True

    def _check_nan(self, logits: Tensor, examples: slice | Tensor | None, draws: int) -> None:
        nan = logits.detach().isnan()
        if nan.any():
            row = int(nan.any(1).nonzero()[0]) % (len(logits) // draws)
            numbers = torch.arange(len(self.counts), device=self.counts.device)
            numbers = numbers if examples is None else numbers[examples]
            known = len(logits) == len(numbers) * draws
            which = f"example {int(numbers[row])}" if known else f"image {row} of a batch of {len(logits)}"
            raise AttackError(f"the model's logits are NaN for {which}")


@dataclass(frozen=True)
class Task:
    """One call of an attack, with its arguments checked."""

    model: Queries
    images: Tensor
    labels: Tensor
    targets: Tensor | None
    optional_generator: torch.Generator | None
    loss_history: bool

    @property
    def generator(self) -> torch.Generator:
        """The caller's generator; attacks that draw random numbers take it from here."""
        if self.optional_generator is None:
            raise ConfigurationError(
                "expected a generator, got None: this attack is random, pass a torch.Generator"
            )
        return self.optional_generator

    @cached_property
    def random(self) -> bool:
        """Whether the model is random: two calls on the same images give different logits."""
        return not is_deterministic(lambda images: self.model(images, slice(len(images))), self.images[:8])

    def draws(self, wanted: int | None) -> int:
        """`wanted` draws behind each loss; if None, one of a deterministic model and ten of a random one."""
        return wanted if wanted is not None else default_draws(self.random)

    def result(self, images: Tensor, **fields: Any) -> AttackResult:
        """A result with the cost and the state of the gradients as the task's model has counted them."""
        counted = {
            "queries": self.model.counts,
            "gradients": self.model.gradients,
            "unusable_gradients": self.model.unusable_gradients,
        }
        return AttackResult(images, **{**counted, **fields})

    def delegate(
        self, attack: "Attack", model: Model | None = None, targets: Tensor | None = None
    ) -> AttackResult:
        """Run another attack on the same examples, on `model` if given."""
        return attack.attempt(
            self.model.model if model is None else model,
            self.images,
            self.labels,
            generator=self.optional_generator,
            targets=self.targets if targets is None else targets,
            loss_history=self.loss_history,
        )


class Attack(ABC):
    """An attack is a frozen object, called as `attack(model, images, labels, generator=…)`.

    `model` is any callable images → logits, used in the mode it is in: call `model.eval()` first. In training
    mode batch normalization is attacked as in evaluation mode, with a warning, so that its statistics do not
    move. The model's mode, parameters and their gradients are left as they are.
    `labels` are the true classes; with `targets` the attack aims at those classes instead of any wrong one.
    The returned images lie in `threat`; with epsilon = 0 they are the input. Where gradients are unusable
    (see `AttackResult`) the call emits one `GradientWarning`.

    To write your own, derive a frozen dataclass with a field `threat` and implement `run`; returning
    `task.result(images)` fills in the cost. `menet.attacks.build("package.module:Class")` finds it by name.
    """

    title: ClassVar[str] = "attack"
    """The name in reports; that of the class unless set."""
    targetable: ClassVar[bool] = True
    minimum_norm: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # Not inherited: a variant of PGD that sets no title would be reported as PGD.
        if "title" not in cls.__dict__:
            cls.title = cls.__name__

    if TYPE_CHECKING:
        # At run time, dataclasses would take the property for the default of their field `threat`.
        @property
        def threat(self) -> ThreatModel:
            """The threat model: norm, budget epsilon and pixel range."""

    @abstractmethod
    def run(self, task: Task) -> AttackResult:
        """The attack itself, on checked arguments; call the object instead."""

    def resolved(self, random: bool) -> Self:
        """The same attack with the settings that follow the model spelled out, so that a record says what ran."""
        return self

    def __call__(
        self,
        model: Model,
        images: Tensor,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
        targets: Tensor | None = None,
        loss_history: bool = False,
    ) -> AttackResult:
        result = self.attempt(
            model, images, labels, generator=generator, targets=targets, loss_history=loss_history
        )
        unusable = 0 if result.unusable_gradients is None else int(result.unusable_gradients.sum())
        if unusable:
            warnings.warn(
                f"{self.title}: the gradients of {unusable} of {len(images)} examples are NaN, infinite or zero "
                "at every step, so their robustness is not tested; check the model, try another loss, or use an "
                "attack without gradients (square, spsa)",
                GradientWarning,
                stacklevel=2,
            )
        return result

    def attempt(
        self,
        model: Model,
        images: Tensor,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
        targets: Tensor | None = None,
        loss_history: bool = False,
    ) -> AttackResult:
        """Like calling the attack, but without a warning: for attacks made of others, which warn once."""
        check_images(images, self.threat)
        check_classes("labels", labels, images)
        if targets is not None:
            check_classes("targets", targets, images)
            if not self.targetable:
                raise ConfigurationError(f"expected no targets, got some: {self.title} has no targeted variant")
        if not (self.threat.bounded or self.minimum_norm):
            raise ConfigurationError(f"expected a finite epsilon for {self.title}, got {self.threat.epsilon}")
        if self.threat.epsilon == 0 or len(images) == 0:
            return unperturbed(images)
        originals = images.detach()
        with frozen_batchnorm(model) as training:
            if training:
                warnings.warn(
                    f"{self.title}: the model is in training mode; it is attacked with batch normalization in "
                    "evaluation mode, so that its statistics stay as they are (call model.eval() first)",
                    stacklevel=3,
                )
            result = self.run(
                Task(Queries(model, labels, targets), originals, labels, targets, generator, loss_history)
            )
        for candidate in (result.images, *(() if result.restarts is None else result.restarts)):
            self.threat.check(candidate, originals)
        return replace(result, originals=originals)


def check_images(images: Tensor, threat: ThreatModel) -> None:
    """Raise `ConfigurationError` for what is not a batch of images in the pixel range."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ConfigurationError(
            "expected floating-point images of shape (B, C, H, W), "
            f"got {images.dtype} of shape {tuple(images.shape)}"
        )
    inside = ((images >= threat.low) & (images <= threat.high)).flatten(1).all(1)
    if not inside.all():
        example = int((~inside).nonzero()[0])
        raise ConfigurationError(
            f"expected images with pixels from {threat.low:g} to {threat.high:g}, got "
            f"{float(images[example].min()):g} to {float(images[example].max()):g} at example {example}"
        )


def check_classes(name: str, classes: Tensor, images: Tensor) -> None:
    """Raise `ConfigurationError` for what is not one class index per image."""
    if classes.dtype != torch.int64 or classes.shape != images.shape[:1]:
        raise ConfigurationError(
            f"expected {name} of type int64 and shape ({len(images)},), got {classes.dtype} of shape "
            f"{tuple(classes.shape)}"
        )
    if classes.device != images.device:
        raise ConfigurationError(
            f"expected {name} on {images.device}, the device of the images, got {classes.device}"
        )
    if len(classes) and int(classes.min()) < 0:
        raise ConfigurationError(f"expected {name} >= 0, got {int(classes.min())}")
