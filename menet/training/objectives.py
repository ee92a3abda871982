"""Training objectives: standard, adversarial (Madry et al. 2018), N-FGSM (de Jorge et al. 2022) and TRADES
(Zhang et al. 2019).

Each is a small callable from a batch to its loss. How gradients pass the defense during the attack is the
defense's own setting.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from menet.attacks import PGD, ThreatModel
from menet.attacks.base import Queries, frozen_batchnorm
from menet.attacks.losses import CROSS_ENTROPY, MAX_BATCH, ExpectedLoss
from menet.distributed import Worker
from menet.models import Network
from menet.preprocessed import Preprocessed
from menet.training.config import TrainingConfig


class LossAndLogits(NamedTuple):
    """The loss of a batch, and the logits its training accuracy is computed from."""

    loss: Float[Tensor, ""]
    logits: Float[Tensor, "b classes"]


@dataclass(frozen=True)
class Standard:
    """Cross-entropy on clean images. Those that are `prepared` are estimates already and skip the defense.

    Of a network of experts it is the loss of their vote, and a part of the mean over them.
    """

    prepared: bool = False
    label_smoothing: float = 0.0

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> LossAndLogits:
        if self.prepared and isinstance(model, Preprocessed):
            model = model.classifier
        if isinstance(model, Network) and model.partitions is not None:
            cells = model.cell_logits(images)
            every = labels.repeat_interleave(cells.shape[1])
            alone = smoothed_cross_entropy(cells.flatten(0, 1), every, self.label_smoothing)
            return LossAndLogits(ALONE * alone + vote_loss(cells, labels), cells.mean(1))
        logits = model(images)
        return LossAndLogits(smoothed_cross_entropy(logits, labels, self.label_smoothing), logits)


ALONE, VOTE_SHARPNESS, VOTE_MARGIN = 0.2, 8.0, 0.3
"""Of experts: the weight of what each has to answer alone, and the two of `vote_loss`.

More weight and more margin make larger radii and fewer right votes. Chosen for 49 and 64 cells, on training
images that were held out.
"""


def vote_loss(cells: Float[Tensor, "b cells classes"], labels: Int[Tensor, " b"]) -> Float[Tensor, ""]:
    """How little the label leads every rival among the experts: what a certificate by pairwise votes is made of.

    The lead over a class is the mean over the experts of tanh(difference of logits), a smooth pairwise vote, and
    the loss is the cross-entropy of the leads as logits, with a margin: a lead just above zero is a right vote
    that a few pixels turn. Trained by their own cross-entropy alone, experts err on the same images; this one
    asks for votes where they are missing.
    """
    cells = cells.float()  # they may come from autocast
    own = cells.gather(2, labels[:, None, None].expand(-1, cells.shape[1], 1))
    lead = (own - cells).tanh().mean(1)
    # Over the label itself there is no lead, and none is asked for: the term of the cross-entropy that stays.
    short = (VOTE_MARGIN - lead).scatter(1, labels[:, None], 0.0)
    return torch.logsumexp(VOTE_SHARPNESS * short, 1).mean()


@dataclass(frozen=True)
class Adversarial:
    """Cross-entropy on adversarial examples alone (Madry et al. 2018), with fresh draws at each attack step."""

    attack: PGD
    label_smoothing: float = 0.0

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
        return LossAndLogits(smoothed_cross_entropy(logits, labels, self.label_smoothing), logits)


@dataclass(frozen=True)
class NFGSM:
    """Cross-entropy at one gradient step of ε from a noisy image (N-FGSM, de Jorge et al. 2022).

    The noise is uniform in the ball of `noise`·ε, and the perturbation is not projected back into the ε-ball:
    pixels are clipped to their range and nothing else. That is what keeps a single step from catastrophic
    overfitting, at two forward and two backward passes per step. Of `attack` only the threat model, the number
    of draws per gradient and the largest batch are used.
    """

    attack: PGD
    label_smoothing: float = 0.0
    noise: float = 2.0

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> LossAndLogits:
        threat = self.attack.threat
        noisy = replace(threat, epsilon=self.noise * threat.epsilon).random_start(images, generator)
        with frozen_batchnorm(model):
            queries = Queries(model, labels)
            expected = ExpectedLoss(
                queries, CROSS_ENTROPY, labels, draws=self.attack.eot or 1, max_batch=self.attack.max_batch
            )
            _, gradient = expected.gradient(noisy)
        moved = torch.add(noisy, threat.direction(gradient), alpha=threat.epsilon)
        logits = model(moved.clamp(threat.low, threat.high))
        return LossAndLogits(smoothed_cross_entropy(logits, labels, self.label_smoothing), logits)


@dataclass(frozen=True)
class Trades:
    """Clean cross-entropy plus `beta` times the robust term KL(clean ‖ adversarial) (Zhang et al. 2019).

    The attack maximizes the divergence from a random start in the whole ε-ball, where the original starts within
    0.001 of the image. The logits returned are those of the adversarial examples.
    """

    attack: PGD
    beta: float
    label_smoothing: float = 0.0

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
        cross_entropy = smoothed_cross_entropy(clean, labels, self.label_smoothing)
        return LossAndLogits(cross_entropy + self.beta * divergence, adversarial)


BatchLoss = Standard | Adversarial | NFGSM | Trades
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


def build_objective(config: TrainingConfig, worker: Worker, *, estimated: bool = False) -> BatchLoss:
    """The objective of a configuration; `estimated` if its images are estimates already."""
    smoothing = config.label_smoothing
    if config.objective == "standard":
        return Standard(estimated or config.prepared is not None, smoothing)
    attack = training_attack(config, worker)
    if config.objective == "trades":
        return Trades(attack, config.beta, smoothing)
    if config.objective == "n-fgsm":
        return NFGSM(attack, smoothing, config.noise)
    return Adversarial(attack, smoothing)


def weakened(objective: BatchLoss, strength: float) -> BatchLoss:
    """The objective with `strength` times the budget and step size of its attack."""
    if strength == 1 or isinstance(objective, Standard):
        return objective
    attack = objective.attack
    threat = replace(attack.threat, epsilon=strength * attack.threat.epsilon)
    size = None if attack.step_size is None else strength * attack.step_size
    return replace(objective, attack=replace(attack, threat=threat, step_size=size))


def smoothed_cross_entropy(
    logits: Float[Tensor, "b classes"], labels: Int[Tensor, " b"], smoothing: float
) -> Float[Tensor, ""]:
    """Mean cross-entropy to targets of which `smoothing` is spread evenly over the classes."""
    return functional.cross_entropy(logits, labels, label_smoothing=smoothing)
