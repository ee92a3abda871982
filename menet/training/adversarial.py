"""Objectives on images that an attack has changed: adversarial training and TRADES."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from menet.attacks import PGD, ThreatModel
from menet.attacks.eot import ROWS
from menet.distributed import Worker
from menet.training.config import TrainingConfig
from menet.training.standard import Outcome


@dataclass(frozen=True)
class SharedThreat(ThreatModel):
    """Random starts drawn for the batch of all processes, of which each takes its part.

    So the starts, like masks and crops, do not depend on the number of processes.
    """

    rank: int = 0
    world: int = 1

    def random_start(self, origin: Tensor, generator: torch.Generator) -> Tensor:
        whole = super().random_start(origin.repeat(self.world, 1, 1, 1), generator)
        return whole[self.rank * len(origin) : (self.rank + 1) * len(origin)]


def attack_of(config: TrainingConfig, place: Worker | None = None) -> PGD:
    """The attack a configuration trains against; with a place, it starts as it would in one process."""
    place = Worker() if place is None else place
    return PGD(
        threat=SharedThreat(config.norm, config.epsilon, rank=place.rank, world=place.world),
        steps=config.steps,
        step_size=config.step_size,
        eot=config.eot,
        keep="last",
        rows=max(ROWS, config.batch // place.world),
    )


@dataclass(frozen=True)
class Adversarial:
    """Cross-entropy on the attacked images alone (Madry et al. 2018), each step of the attack under fresh masks.

    How gradients pass the defense during the attack is the defense's own setting.
    """

    attack: PGD

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> Outcome:
        with still_statistics(model):
            attacked = self.attack(model, images, labels, generator=generator).images
        logits = model(attacked)
        return functional.cross_entropy(logits, labels), logits


@dataclass(frozen=True)
class Trades:
    """Cross-entropy on clean images plus `beta` times how far an attack can move the answer (Zhang et al. 2019).

    The distance is the Kullback-Leibler divergence of the answer to the attacked image from that to the clean
    one. The attack starts anywhere in the ball, where the original starts within 0.001 of the image. The
    accuracy told is that on attacked images.
    """

    attack: PGD
    beta: float

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> Outcome:
        with still_statistics(model):
            with torch.no_grad():
                reference = model(images).softmax(-1)
            # One pass for the whole batch, so that rows and references stay in step.
            attack = replace(self.attack, loss=DivergenceFrom(reference), rows=len(images) * self.attack.eot)
            attacked = attack(model, images, labels, generator=generator).images
        clean, moved = model(images), model(attacked)
        divergence = functional.kl_div(
            moved.log_softmax(-1), clean.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return functional.cross_entropy(clean, labels) + self.beta * divergence, moved


@dataclass(frozen=True)
class DivergenceFrom:
    """How far answers are from `reference` probabilities, one number per image: what TRADES' attack raises."""

    reference: Tensor

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
        reference = self.reference.repeat(len(logits) // len(self.reference), 1)
        return functional.kl_div(logits.log_softmax(-1), reference, reduction="none").sum(-1)


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Batch normalisation by its running statistics, which stay as they are; all else stays in its mode.

    Otherwise the attack's iterates, which the network is not trained on, would enter the statistics it is
    evaluated with. The defense keeps drawing from its training schedule.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    modes = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.train(mode)
