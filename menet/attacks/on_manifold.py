"""Adversarial examples in the range of a generator, for defenses that project onto it (Athalye et al. 2018)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from menet.attacks.base import Attack, AttackResult, Model, Queries, Task, wide
from menet.attacks.eot import MAX_BATCH, ExpectedLoss
from menet.attacks.losses import MARGIN, Loss
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError

Generate = Callable[[Tensor], Tensor]
"""From latent vectors (n, latent) to images (n, c, h, w)."""


@dataclass(frozen=True, kw_only=True)
class OnManifold(Attack):
    """Search the latent space for an image that the classifier gets wrong, as near to the budget as possible.

    A defense that replaces an image by the nearest one of a generator G leaves images of G as they are. From
    `starts` random latent vectors per example, Adam first takes `steps` steps towards the image, and then as many
    on the classifier's loss at G(z), minus `weight` times the mean squared distance from G(z) to the ball around
    the image. The projection of G(z) into that ball is the candidate; the one of highest expected loss of the
    attacked model is returned. The attacked model is queried for that choice alone.

    Athalye, Carlini & Wagner minimize the l2 distance without a budget; here the ball is that of every attack.
    """

    title: ClassVar[str] = "on manifold"

    generate: Generate = field(repr=False)
    classifier: Model = field(repr=False)
    latent: int
    """The size of a latent vector."""
    threat: ThreatModel = CIFAR10
    steps: int = 100
    starts: int = 4
    learning_rate: float = 0.05
    weight: float = 300.0
    confidence: float = 10.0
    """The loss counts up to here: the projection will not end exactly at G(z), so 0 would not be enough."""
    loss: Loss = MARGIN
    eot: int | None = None
    """Draws of the model's randomness that candidates are compared by."""
    max_batch: int = MAX_BATCH

    def __post_init__(self) -> None:
        for name in ("latent", "steps", "starts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not (self.learning_rate > 0 and self.weight >= 0):
            raise ConfigurationError(
                f"expected learning_rate > 0 and weight >= 0, got {self.learning_rate} and {self.weight}"
            )

    def run(self, task: Task) -> AttackResult:
        candidates = torch.stack([self._search(task) for _ in range(self.starts)])
        oracle = ExpectedLoss.of(task, self.loss, task.draws(self.eot), self.max_batch)
        losses = torch.stack([oracle.value(one) for one in candidates]).nan_to_num(nan=-torch.inf)
        winner = losses.argmax(0)
        images = candidates[winner, torch.arange(len(winner), device=winner.device)]
        return task.result(images, restarts=candidates if self.starts > 1 else None)

    def _search(self, task: Task) -> Tensor:
        """Candidates inside the threat model, one for each image, from one start."""
        classifier = Queries(self.classifier, task.labels, task.targets)
        start = torch.randn(len(task.images), self.latent, generator=task.generator)
        latents = start.to(task.images).requires_grad_()
        optimizer = torch.optim.Adam([latents], self.learning_rate)
        best = task.images.clone()
        least = task.images.new_full((len(best),), torch.inf)
        with torch.enable_grad():
            for step in range(2 * self.steps):
                generated = self.generate(latents)
                if generated.shape != task.images.shape:
                    raise ConfigurationError(
                        f"expected generated images of shape {tuple(task.images.shape)}, "
                        f"got {tuple(generated.shape)}"
                    )
                # At first the image itself is the goal, to begin the search near it.
                goal = task.images
                if step >= self.steps:
                    goal = self.threat.project(generated.detach(), task.images)
                objective = self.weight * (generated - goal).square().flatten(1).mean(1)
                if step >= self.steps:
                    logits = classifier(generated)
                    gain = self.loss(logits, task.labels, task.targets)
                    objective = objective - gain.clamp(max=self.confidence)
                    better = objective.detach() < least
                    best = torch.where(wide(better), goal, best)
                    least = torch.where(better, objective.detach(), least)
                (slope,) = torch.autograd.grad(objective.sum(), latents)
                # Where the gradient is not finite the search stays, and NaN is never better.
                latents.grad = slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                optimizer.step()
        return best
