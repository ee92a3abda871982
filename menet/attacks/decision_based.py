"""Decision-based attacks by foolbox: Boundary (Brendel et al. 2018) and HopSkipJump (Chen et al. 2020)."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from menet.attacks.base import Attack, AttackResult, Task, wide
from menet.attacks.external import Bridge, bridged, require_determinism, require_unit_range
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError, require

BISECTIONS = 10
SCALES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


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
