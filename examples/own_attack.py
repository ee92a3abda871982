"""An attack of your own: a frozen dataclass with `run(task)`, then evaluated like any other.

On the command line the same class is `menet evaluate RUN --attacks examples.own_attack:Momentum:steps=20`, which
imports this module and so runs its code. The module must be importable: set `PYTHONPATH=.` in the folder of the
repository, unless `menet` is installed from it in editable mode.
"""

from dataclasses import dataclass

import torch

import menet
from menet.attacks import PGD
from menet.attacks.base import Attack, AttackResult, Task
from menet.attacks.losses import CrossEntropy

THREAT = menet.ThreatModel("linf", 0.1)


@dataclass(frozen=True, kw_only=True)
class Momentum(Attack):
    """Momentum iterative FGSM (Dong et al. 2018): steps along the sign of an accumulated gradient."""

    threat: menet.ThreatModel = THREAT
    steps: int = 10
    decay: float = 1.0

    def run(self, task: Task) -> AttackResult:
        loss, images = CrossEntropy(), task.images
        accumulated = torch.zeros_like(images)
        for _ in range(self.steps):
            leaf = images.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(task.model(leaf), task.labels).sum(), leaf)
            accumulated = self.decay * accumulated + gradient / gradient.abs().mean((1, 2, 3), keepdim=True)
            step = self.threat.epsilon / self.steps * accumulated.sign()
            images = self.threat.project(images + step, task.images)
        # The base class checks that the result lies in the threat model; `task.model` has counted its queries.
        return AttackResult(images=images, queries=task.model.counts)


def main() -> None:
    testing = menet.data.load("digits", "test")
    images, labels = testing.batch(slice(0, 100))
    model = trained(menet.data.load("digits", "train"))
    for attack in (Momentum(), PGD(threat=THREAT, steps=10)):
        result = attack(model, images, labels, generator=torch.Generator().manual_seed(0))
        accuracy = (model(result.images).argmax(1) == labels).float().mean()
        print(f"{type(attack).__name__:9} robust accuracy {accuracy:.0%}  {result}")


def trained(dataset: "menet.data.Dataset") -> torch.nn.Module:
    """A network to attack: a few passes over the digits."""
    torch.manual_seed(0)
    model = menet.models.build("small", dataset, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(2):
        for index in torch.randperm(len(dataset)).split(100):
            images, labels = dataset.batch(index)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.eval()


if __name__ == "__main__":
    main()
