"""Training objectives: standard, adversarial (Madry et al. 2018) and TRADES (Zhang et al. 2019).

Each is a small callable from a batch to its loss. How gradients pass the defense during the attack is the
defense's own setting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from menet.attacks import PGD, ThreatModel
from menet.attacks.eot import MAX_BATCH
from menet.distributed import Worker
from menet.preprocessed import Preprocessed
from menet.training.config import TrainingConfig


class LossAndLogits(NamedTuple):
    """The loss of a batch, and the logits its training accuracy is computed from."""

    loss: Float[Tensor, ""]
    logits: Float[Tensor, "b classes"]


@dataclass(frozen=True)
class Standard:
    """Cross-entropy on clean images. Images of a prepared set are estimates already and skip the defense."""

    prepared: bool = False

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> LossAndLogits:
        if self.prepared and isinstance(model, Preprocessed):
            model = model.classifier
        logits = model(images)
        return LossAndLogits(functional.cross_entropy(logits, labels), logits)


@dataclass(frozen=True)
class Adversarial:
    """Cross-entropy on adversarial examples alone (Madry et al. 2018), with fresh draws at each attack step."""

    attack: PGD

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> LossAndLogits:
        with frozen_batchnorm(model):
            attacked = self.attack(model, images, labels, generator=generator).images
        logits = model(attacked)
        return LossAndLogits(functional.cross_entropy(logits, labels), logits)


@dataclass(frozen=True)
class Trades:
    """Clean cross-entropy plus `beta` times the robust term KL(clean ‖ adversarial) (Zhang et al. 2019).

    The attack maximizes the divergence from a random start in the whole ε-ball, where the original starts within
    0.001 of the image. The logits returned are those of the adversarial examples.
    """

    attack: PGD
    beta: float

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> LossAndLogits:
        with frozen_batchnorm(model):
            with torch.no_grad():
                reference = model(images).softmax(-1)
            # One pass for the whole batch, so that logits and references stay aligned.
            attack = replace(
                self.attack, loss=DivergenceFrom(reference), max_batch=len(images) * (self.attack.eot or 1)
            )
            attacked = attack(model, images, labels, generator=generator).images
        clean, adversarial = model(images), model(attacked)
        divergence = functional.kl_div(
            adversarial.log_softmax(-1), clean.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return LossAndLogits(functional.cross_entropy(clean, labels) + self.beta * divergence, adversarial)


BatchLoss = Standard | Adversarial | Trades
"""An objective: (model, images, labels, generator) → loss and logits."""


@dataclass(frozen=True)
class DivergenceFrom:
    """KL divergence from `reference` probabilities, one number per image: the loss of TRADES' attack."""

    reference: Tensor

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
        reference = self.reference.repeat(len(logits) // len(self.reference), 1)
        return functional.kl_div(logits.log_softmax(-1), reference, reduction="none").sum(-1)


@dataclass(frozen=True)
class SharedThreat(ThreatModel):
    """A threat model whose random starts are drawn for the whole batch, of which each process takes its part.

    So the starts, like masks and crops, do not depend on the number of processes.
    """

    rank: int = 0
    world: int = 1

    def random_start(self, origin: Tensor, generator: torch.Generator) -> Tensor:
        whole = super().random_start(origin.repeat(self.world, 1, 1, 1), generator)
        return whole[self.rank * len(origin) : (self.rank + 1) * len(origin)]


def training_attack(config: TrainingConfig, worker: Worker | None = None) -> PGD:
    """The attack a configuration trains against; its random starts do not depend on the number of workers."""
    worker = Worker() if worker is None else worker
    return PGD(
        threat=SharedThreat(config.norm, config.epsilon, rank=worker.rank, world=worker.world),
        steps=config.steps,
        step_size=config.step_size,
        eot=config.eot,
        keep="last",
        max_batch=max(MAX_BATCH, config.batch_size // worker.world),
    )


def build_objective(config: TrainingConfig, worker: Worker) -> BatchLoss:
    """The objective of a configuration."""
    if config.objective == "adversarial":
        return Adversarial(training_attack(config, worker))
    if config.objective == "trades":
        return Trades(training_attack(config, worker), config.beta)
    return Standard(prepared=config.prepared is not None)


@contextmanager
def frozen_batchnorm(model: nn.Module) -> Iterator[None]:
    """Batch normalization in evaluation mode, everything else in the mode it is in.

    Otherwise the attack's iterates, which the network is not trained on, would enter the running statistics it
    is evaluated with. The defense keeps drawing from its training schedule.
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
