"""Attacks that craft their change at another point than the image, and carry it over to the image."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from menet.attacks.base import Task
from menet.attacks.kinds import Images
from menet.attacks.pgd import PGD
from menet.attacks.result import AttackResult
from menet.errors import ConfigurationError

Reconstruct = Callable[[Tensor], Tensor]
"""Images to the estimates that a defense would hand its classifier."""


@dataclass(frozen=True, kw_only=True)
class DisplacedPGD(PGD):
    """PGD in the ball around `reconstruct(images)`; the change it finds is then added to the images.

    The sum stays within epsilon of the true image, since the change does, and is clipped to the range of
    pixels.
    """

    reconstruct: Reconstruct = field(repr=False)

    def run(self, task: Task) -> AttackResult:
        with torch.no_grad():
            base = self.reconstruct(task.images)
        if base.shape != task.images.shape:
            raise ConfigurationError(
                f"reconstruct gave shape {tuple(base.shape)} for images of shape {tuple(task.images.shape)}"
            )
        base = base.clamp(self.threat.low, self.threat.high)
        found = super().run(replace(task, images=base))

        def carried(images: Images) -> Images:
            return self.threat.project(task.images + (images - base), task.images)

        restarts = None if found.restarts is None else torch.stack([carried(one) for one in found.restarts])
        return replace(found, images=carried(found.images), restarts=restarts)
