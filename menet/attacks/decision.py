"""What decision-based attacks share: a first misclassified image for each example, and foolbox underneath."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from menet.attacks.base import Attack, Task
from menet.attacks.foreign import Bridge, bridged, require_determinism, require_unit_range
from menet.attacks.result import AttackResult
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError

BISECTIONS = 10
STRETCHES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class DecisionAttack(Attack):
    """An attack that learns only the predicted class, and walks along the boundary towards the image.

    It needs a model that answers alike each time: a random defense is attacked with frozen masks, or through
    its vote. A starting point is, for each example, the first image that is classified otherwise among
    `starts`, the other images of the batch, and uniform noise, moved towards the example as far as that
    lasts. An example with none is returned unchanged and marked in `failed`; it never stops the others. One
    that is already misclassified is returned unchanged, too.

    Minimum-norm attacks know no epsilon. What they find goes to `unlimited`. `images` is brought into the
    threat model: the first misclassified one among the projections of ever longer changes in the same
    direction, or the projection of what was found. So the accuracy on `images` is that under epsilon; with
    `ThreatModel(epsilon=math.inf)` both are the same.
    """

    threat: ThreatModel = CIFAR10
    starts: Tensor | None = field(default=None, repr=False, compare=False)
    """Images (n,C,H,W) to start from, for instance correctly classified ones of other classes."""
    tries: int = 100
    """Most starting points to look at for each example."""

    minimum_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigurationError(f"tries is {self.tries}; it must be 1 or more")
        require_unit_range(self.threat, "foolbox")

    @abstractmethod
    def foolbox_attack(self) -> Any:
        """The foolbox attack that walks; called only when the attack runs."""

    def run(self, task: Task) -> AttackResult:
        name = type(self).__name__
        already = _is_wrong(require_determinism(task, name), task)
        with bridged(task, name) as (bridge, _), torch.no_grad():
            start, found = self._starting_points(task, bridge)
            walking = found & ~already
            result = task.images
            if walking.any():
                result = torch.where(_wide(walking), self._walk(task, bridge, start, walking), task.images)
            images = self._into_the_ball(task, bridge, result)
        return AttackResult(
            images=images,
            queries=task.model.counts,
            failed=~(found | already),
            unlimited=result,
        )

    def _walk(self, task: Task, bridge: Bridge, start: Tensor, walking: Tensor) -> Tensor:
        # foolbox is imported here because it needs git on the machine, which no other attack does.
        import eagerpy
        from foolbox import PyTorchModel
        from foolbox.criteria import Criterion

        # Frozen masks belong to places in the batch, so the batch keeps its size. In the place of an example
        # that takes no part stands an easy one: from white towards black, with the boundary half way.
        black, white = torch.zeros_like(start), torch.ones_like(start)

        class Wrong(Criterion):
            def __repr__(self) -> str:
                return "Wrong()"

            def __call__(self, perturbed: Any, outputs: Any) -> Any:
                bright = perturbed.raw.flatten(1).mean(1) > 0.5
                return eagerpy.astensor(torch.where(walking, _is_wrong(outputs.raw.argmax(1), task), bright))

        found: Tensor = self.foolbox_attack().run(
            PyTorchModel(bridge, bounds=(0, 1), device=start.device),
            torch.where(_wide(walking), task.images, black),
            Wrong(),
            starting_points=torch.where(_wide(walking), start, white),
        )
        return found.clamp(0, 1)

    def _into_the_ball(self, task: Task, bridge: Bridge, found: Tensor) -> Tensor:
        # What was found lies on the boundary, and clipping it usually falls back behind. Going further in the
        # same direction before clipping makes up for that, at a few calls.
        images, done = (
            self.threat.project(found, task.images),
            torch.zeros_like(task.labels, dtype=torch.bool),
        )
        if not self.threat.bounded:
            return images
        for stretch in STRETCHES:
            candidate = self.threat.project(torch.lerp(task.images, found, stretch), task.images)
            new = _is_wrong(bridge(candidate).argmax(1), task) & ~done
            images, done = torch.where(_wide(new), candidate, images), done | new
        return images

    def _starting_points(self, task: Task, bridge: Bridge) -> tuple[Tensor, Tensor]:
        start, found = task.images, torch.zeros_like(task.labels, dtype=torch.bool)
        for attempt in range(self.tries):
            if found.all():
                break
            candidate = self._candidate(task, attempt)
            new = _is_wrong(bridge(candidate).argmax(1), task) & ~found
            start, found = torch.where(_wide(new), candidate, start), found | new
        far, near = torch.ones_like(start[:, :1, :1, :1]), torch.zeros_like(start[:, :1, :1, :1])
        for _ in range(BISECTIONS):
            middle = (far + near) / 2
            wrong = _wide(_is_wrong(bridge(torch.lerp(task.images, start, middle)).argmax(1), task))
            far, near = torch.where(wrong, middle, far), torch.where(wrong, near, middle)
        return torch.lerp(task.images, start, far), found

    def _candidate(self, task: Task, attempt: int) -> Tensor:
        given = 0 if self.starts is None else len(self.starts)
        if self.starts is not None and attempt < given:
            return self.starts[attempt].to(task.images).expand_as(task.images)
        # Both in turn: noise often falls in one class only, which is that of some of the examples.
        shift, use_noise = divmod(attempt - given, 2)
        if use_noise or len(task.images) == 1:
            return torch.rand_like(task.images)
        return task.images.roll(shift % (len(task.images) - 1) + 1, 0)


def _is_wrong(predicted: Tensor, task: Task) -> Tensor:
    return predicted != task.labels if task.targets is None else predicted == task.targets


def _wide(choice: Tensor) -> Tensor:
    return choice.view(-1, 1, 1, 1)
