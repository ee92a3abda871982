"""Attacks of other libraries: a model and a random stream for them, and the attacks that run on these.

CW-L2 and the decision-based attacks, Boundary (Brendel et al. 2018) and HopSkipJump (Chen et al. 2020), are
foolbox's, AutoAttack is pyautoattack's. Square (`score_based`) uses the same bridge.
"""

import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from menet.attacks.base import Attack, AttackResult, Queries, Task, is_deterministic, wide
from menet.attacks.losses import MAX_BATCH
from menet.attacks.threat import CIFAR10, MINIMUM_L2, ThreatModel
from menet.errors import AttackError, ConfigurationError, NotDifferentiable, require
from menet.progress import Reporter, reporting

NORMS = {"linf": "Linf", "l2": "L2"}
"""pyautoattack's names."""
# Of decision-based attacks: steps towards the image, and lengths of what was found that are projected.
BISECTIONS = 10
SCALES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Bridge(nn.Module):
    """The task's model as the `nn.Module` that other libraries expect.

    They call `backward`, which would write to the parameters' gradients, and `to` or `eval`, which would change
    the model. Here the model is not a submodule, and gradients reach only the images. Progress counts forward
    passes.
    """

    def __init__(self, task: Task, progress: Reporter) -> None:
        super().__init__()
        self._queries, self._type, self._progress = task.model, task.images.dtype, progress
        self.training = False

    def forward(self, images: Tensor) -> Tensor:
        self._progress.advance()
        batch = images.to(self._type)
        if torch.is_grad_enabled() and images.requires_grad:
            logits = _ImageGradient.apply(batch, self._queries)
        else:
            with torch.no_grad():
                # A copy, since pyautoattack writes to the logits it is given.
                logits = self._queries(batch).clone()
        return logits.to(images.dtype)


class _ImageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, queries: Queries) -> Tensor:
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            logits = queries(leaf)
        if not logits.requires_grad:
            raise NotDifferentiable
        ctx.graph, ctx.queries = (leaf, logits), queries
        return logits.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (leaf, logits), (at_logits,) = ctx.graph, gradients
        # The graph is kept for FAB, which takes one gradient per class.
        (gradient,) = torch.autograd.grad(logits, leaf, at_logits, retain_graph=True)
        return ctx.queries.checked_gradient(gradient, logits.detach(), at_logits), None


@contextmanager
def bridged(task: Task, title: str) -> Iterator[tuple[Bridge, int]]:
    """A bridge and a seed, for a block after which torch's global generator is as it was before.

    foolbox and pyautoattack draw from the global generator, and pyautoattack reseeds it. Here the seed comes from
    the task's generator, so that the attack is reproducible.
    """
    seed = int(torch.randint(2**31, (), generator=task.generator, device=task.generator.device))
    device = task.images.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        reporting(f"{title} (forward passes)") as progress,
    ):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield Bridge(task, progress), seed


def require_determinism(task: Task, title: str) -> Tensor:
    """Predictions for the images, or `AttackError` if two calls of the model disagree."""
    logits: list[Tensor] = []

    def recorded(images: Tensor) -> Tensor:
        logits.append(task.model(images))
        return logits[-1]

    if not is_deterministic(recorded, task.images):
        raise AttackError(
            f"{title} needs a deterministic model, and the logits of two calls differ by up to "
            f"{float((logits[0] - logits[1]).abs().max()):.3g}: fix the random draws of the defense, or attack "
            "its vote over many"
        )
    return logits[0].argmax(1)


def require_unit_range(threat: ThreatModel, library: str) -> None:
    """Raise `ConfigurationError` for a pixel range that the library does not support."""
    if not (threat.low == 0 and threat.high == 1):
        raise ConfigurationError(
            f"expected a pixel range of 0 to 1 for {library}, got {threat.low:g} to {threat.high:g}"
        )


@dataclass(frozen=True, kw_only=True)
class CWL2(Attack):
    """The smallest l2 perturbation that is misclassified with a given confidence (Carlini & Wagner 2017).

    `unprojected` holds what was found; `images` is its projection into the threat model, which the model may
    classify correctly again. Where the confidence is out of reach the original image is returned and marked in
    `failed`; foolbox returns a black image there and calls it a success.
    """

    title: ClassVar[str] = "CW-L2"

    threat: ThreatModel = MINIMUM_L2
    confidence: float = 0.0
    """By how much, in logits, the wrong class must win (κ)."""
    steps: int = 1000
    binary_search_steps: int = 9
    """Rounds of the search for the weight of the confidence term."""
    step_size: float = 0.01
    initial_const: float = 0.001
    """The first such weight."""

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("steps", "binary_search_steps", "step_size", "initial_const"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"expected {name} > 0, got {getattr(self, name)}")
        if not self.confidence >= 0:
            raise ConfigurationError(f"expected confidence >= 0, got {self.confidence}")

    def run(self, task: Task) -> AttackResult:
        foolbox = require("foolbox", extra="external")
        attack = foolbox.attacks.L2CarliniWagnerAttack(
            binary_search_steps=self.binary_search_steps,
            steps=self.steps,
            stepsize=self.step_size,
            confidence=self.confidence,
            initial_const=self.initial_const,
        )
        criterion = (
            foolbox.criteria.Misclassification(task.labels)
            if task.targets is None
            else foolbox.criteria.TargetedMisclassification(task.targets)
        )
        with bridged(task, self.title) as (bridge, _), torch.enable_grad():
            bounds = (self.threat.low, self.threat.high)
            model = foolbox.PyTorchModel(bridge, bounds, task.images.device)
            found = attack.run(model, task.images, criterion)
        found = found.to(task.images.dtype).clamp(*bounds)
        # Pixels made by tanh are never all 0: this is foolbox's mark for "nothing found".
        failed = (found == 0).flatten(1).all(1)
        found = torch.where(wide(failed), task.images, found)
        return task.result(self.threat.project(found, task.images), failed=failed, unprojected=found)


@dataclass(frozen=True, kw_only=True)
class DecisionAttack(Attack):
    """An attack that sees only the predicted class, and walks along the decision boundary towards the image.

    It needs a deterministic model: a random defense is attacked with fixed draws, or through its vote. The
    starting point of an example is the first misclassified image among `starts`, the other images of the batch,
    and uniform noise, moved towards the example by bisection. An example without one is returned unchanged and
    marked in `failed`; the others go on. One that is already misclassified is returned unchanged, too.

    Minimum-norm attacks have no budget: `unprojected` holds what they find. `images` is in the threat model: the
    first misclassified image among the projections of the perturbation scaled up step by step, or else the
    projection of what was found. So the accuracy on `images` is that under epsilon; with
    `ThreatModel(epsilon=math.inf)` both are the same.
    """

    threat: ThreatModel = CIFAR10
    starts: Tensor | None = field(default=None, repr=False, compare=False)
    """Images (n,C,H,W) to start from, for instance of other classes."""
    tries: int = 100
    """Candidate starting points per example, at most."""

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigurationError(f"expected tries >= 1, got {self.tries}")
        require_unit_range(self.threat, "foolbox")
        self.threat.require("linf", "l2", by=self.title)

    @abstractmethod
    def foolbox_attack(self) -> Any:
        """The foolbox attack; called only when the attack runs."""

    def run(self, task: Task) -> AttackResult:
        already = _is_wrong(require_determinism(task, self.title), task)
        with bridged(task, self.title) as (bridge, _), torch.no_grad():
            start, found = self._starting_points(task, bridge)
            walking = found & ~already
            result = task.images
            if walking.any():
                result = torch.where(wide(walking), self._walk(task, bridge, start, walking), task.images)
            images = self._into_threat_model(task, bridge, result)
        return task.result(images, failed=~(found | already), unprojected=result)

    def _walk(self, task: Task, bridge: Bridge, start: Tensor, walking: Tensor) -> Tensor:
        foolbox, eagerpy = require("foolbox", extra="external"), require("eagerpy", extra="external")
        # Fixed draws belong to positions in the batch, so the batch keeps its size. An example that takes no part
        # is replaced by an easy one: from white towards black, with the boundary half way.
        black, white = torch.zeros_like(start), torch.ones_like(start)

        class Wrong(foolbox.criteria.Criterion):  # type: ignore[name-defined]
            def __repr__(self) -> str:
                return "Wrong()"

            def __call__(self, perturbed: Any, outputs: Any) -> Any:
                bright = perturbed.raw.flatten(1).mean(1) > 0.5
                return eagerpy.astensor(torch.where(walking, _is_wrong(outputs.raw.argmax(1), task), bright))

        found: Tensor = self.foolbox_attack().run(
            foolbox.PyTorchModel(bridge, bounds=(0, 1), device=start.device),
            torch.where(wide(walking), task.images, black),
            Wrong(),
            starting_points=torch.where(wide(walking), start, white),
        )
        return found.clamp(0, 1)

    def _into_threat_model(self, task: Task, bridge: Bridge, found: Tensor) -> Tensor:
        # What was found lies on the boundary, and its projection is usually classified correctly again. A longer
        # perturbation of the same direction makes up for that, at a few queries.
        images, done = self.threat.project(found, task.images), torch.zeros_like(task.labels, dtype=torch.bool)
        if not self.threat.bounded:
            return images
        for scale in SCALES:
            candidate = self.threat.project(torch.lerp(task.images, found, scale), task.images)
            new = _is_wrong(bridge(candidate).argmax(1), task) & ~done
            images, done = torch.where(wide(new), candidate, images), done | new
        return images

    def _starting_points(self, task: Task, bridge: Bridge) -> tuple[Tensor, Tensor]:
        start, found = task.images, torch.zeros_like(task.labels, dtype=torch.bool)
        for attempt in range(self.tries):
            if found.all():
                break
            candidate = self._candidate(task, attempt)
            new = _is_wrong(bridge(candidate).argmax(1), task) & ~found
            start, found = torch.where(wide(new), candidate, start), found | new
        far, near = torch.ones_like(start[:, :1, :1, :1]), torch.zeros_like(start[:, :1, :1, :1])
        for _ in range(BISECTIONS):
            middle = (far + near) / 2
            wrong = wide(_is_wrong(bridge(torch.lerp(task.images, start, middle)).argmax(1), task))
            far, near = torch.where(wrong, middle, far), torch.where(wrong, near, middle)
        return torch.lerp(task.images, start, far), found

    def _candidate(self, task: Task, attempt: int) -> Tensor:
        given = 0 if self.starts is None else len(self.starts)
        if self.starts is not None and attempt < given:
            return self.starts[attempt].to(task.images).expand_as(task.images)
        # Both in turn: noise often falls in a single class, which is that of some of the examples.
        shift, use_noise = divmod(attempt - given, 2)
        if use_noise or len(task.images) == 1:
            return torch.rand_like(task.images)
        return task.images.roll(shift % (len(task.images) - 1) + 1, 0)


@dataclass(frozen=True, kw_only=True)
class Boundary(DecisionAttack):
    """A random walk along the decision boundary that shortens the l2 distance; the paper takes 1000 steps.

    foolbox adapts its step sizes at every tenth step and waits for 100 adaptations, too few in 1000 steps. Here
    it adapts at every step, from longer first steps: on digits half of the distance is left after 1000 steps, at
    two queries each.
    """

    title: ClassVar[str] = "Boundary"

    steps: int = 1000
    initial_step: float = 0.1
    """Length of the first steps, as a fraction of the distance to the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "initial_step"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"expected {name} > 0, got {getattr(self, name)}")

    def foolbox_attack(self) -> Any:
        return require("foolbox", extra="external").attacks.BoundaryAttack(
            steps=self.steps,
            spherical_step=self.initial_step,
            source_step=self.initial_step,
            update_stats_every_k=1,
        )


@dataclass(frozen=True, kw_only=True)
class HopSkipJump(DecisionAttack):
    """Descent along gradients estimated at the decision boundary, in the norm of the threat model."""

    title: ClassVar[str] = "HopSkipJump"

    steps: int = 64
    initial_evaluations: int = 100
    """Queries for the first gradient estimate; their number grows with the square root of the step."""

    def foolbox_attack(self) -> Any:
        library = require("foolbox", extra="external").attacks

        class NormalizedPerExample(library.HopSkipJumpAttack):  # type: ignore[name-defined]
            """foolbox divides by the norm of the whole batch, so that l2 steps shrink as the batch grows."""

            def approximate_gradients(self, *arguments: Any) -> Any:
                batch = super().approximate_gradients(*arguments)
                lengths = batch.flatten(start=1).norms.l2(axis=-1)
                return batch / (lengths.reshape((-1, 1, 1, 1)) + 1e-12)

        return NormalizedPerExample(
            steps=self.steps,
            initial_gradient_eval_steps=self.initial_evaluations,
            constraint=self.threat.norm,
        )


def _is_wrong(predicted: Tensor, task: Task) -> Tensor:
    return predicted != task.labels if task.targets is None else predicted == task.targets


@dataclass(frozen=True, kw_only=True)
class AutoAttack(Attack):
    """APGD-CE, APGD-T, FAB-T and Square in turn, each on the examples still robust, as pyautoattack runs them.

    For deterministic models: a random defense with fixed draws, or its vote. Examples that withstand all four are
    returned unchanged and marked in `failed`. pyautoattack does not say which examples a call is about, so that
    `queries` is an upper bound, and `unusable_gradients` a lower one.
    """

    title: ClassVar[str] = "AutoAttack"

    threat: ThreatModel = CIFAR10
    max_batch: int = MAX_BATCH
    attacks: tuple[str, ...] = ("apgd-ce", "apgd-t", "fab-t", "square")
    steps: int = 100
    """Steps of APGD and FAB."""
    max_queries: int = 5000
    """Queries per example of Square, at most."""

    targetable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_unit_range(self.threat, "pyautoattack")
        self.threat.require("linf", "l2", by=self.title)
        known = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
        unknown = sorted(set(self.attacks) - set(known))
        if not self.attacks or unknown:
            wrong = f"unknown attack {unknown[0]!r} in AutoAttack" if unknown else "AutoAttack without attacks"
            raise ConfigurationError(f"{wrong}; choose from {', '.join(known)}")

    def run(self, task: Task) -> AttackResult:
        library = require("pyautoattack", extra="external")
        require_determinism(task, self.title)
        with torch.no_grad():
            classes = task.model(task.images[:1], slice(0, 1)).shape[1]
        if classes < 4:
            raise ConfigurationError(
                f"expected a model of at least 4 classes for AutoAttack's targeted loss, got {classes}"
            )
        # pyautoattack's check for dynamic defenses removes any trace function, such as that of coverage.
        tracing = sys.gettrace()
        with bridged(task, self.title) as (bridge, seed):
            suite = library.AutoAttack(
                bridge,
                attacks=list(self.attacks),
                version="custom",
                device=task.images.device,
                eps=self.threat.epsilon,
                norm=NORMS[self.threat.norm],
                seed=seed,
            )
            # The settings of version="standard", which cannot be combined with any others.
            suite.apgd.n_restarts = suite.fab.n_restarts = suite.apgd_targeted.n_restarts = 1
            suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = min(9, classes - 1)
            for part in (suite.apgd, suite.apgd_targeted, suite.fab):
                part.n_iter = self.steps
            suite.square.n_queries = self.max_queries
            try:
                found, _ = suite.run_standard_evaluation(
                    task.images.float(), task.labels, batch_size=self.max_batch
                )
            finally:
                sys.settrace(tracing)
            with torch.no_grad():
                failed = task.model(found.to(task.images.dtype)).argmax(1) == task.labels
        return task.result(self.threat.project(found.to(task.images.dtype), task.images), failed=failed)
