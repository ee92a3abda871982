"""Accuracy during training: what epochs are selected by, what guards a run, and what it reports at its end."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from menet.attacks import FGSM, PGD
from menet.attacks.base import Attack
from menet.data import Dataset
from menet.distributed import Worker
from menet.preprocessed import Preprocessed
from menet.seeding import Stream, stream, stream_seed
from menet.training.building import autocast
from menet.training.checkpoint import Progress

BATCH_SIZE = 500
GUARD_IMAGES = 250
"""Validation images of a check for catastrophic overfitting: few, since a run makes many checks."""
COLLAPSED, GOOD = 0.5, 0.75
"""Fractions of the highest robust accuracy so far: below the first it has collapsed, from the second on good."""
HIGH, LOW = 0.5, 0.1
"""From the first accuracy under FGSM on, robust accuracy below the fraction LOW of it is a collapse by itself."""


def accuracy(
    model: nn.Module,
    dataset: Dataset,
    index: Int[Tensor, " n"] | None = None,
    *,
    seed: int = 0,
    attack: Attack | None = None,
    worker: Worker | None = None,
    precision: torch.dtype = torch.float32,
) -> float:
    """The accuracy on the images at `index` (all if None), with one draw of the defense each.

    With an attack it is the accuracy on adversarial examples. Each batch has its own seed, so the result does
    not depend on the number of workers that share the batches. The model's mode and generator are restored. It
    is a quick estimate to train by; for an evaluation use `menet.evaluation`.
    """
    worker = Worker() if worker is None else worker
    index = torch.arange(len(dataset)) if index is None else index
    was_training = model.training
    state = model.generator.get_state() if isinstance(model, Preprocessed) else None
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=worker.device)
    for number, block in enumerate(index.split(BATCH_SIZE)):
        if number % worker.world != worker.rank:
            continue
        if isinstance(model, Preprocessed):
            model.reseed(stream_seed(seed, Stream.SCORE, number))
        images, labels = (tensor.to(worker.device) for tensor in dataset.batch(block))
        with autocast(precision, worker.device):
            if attack is not None:
                generator = stream(seed, Stream.ATTACK, number)
                images = attack(model, images, labels, generator=generator).images
            with torch.no_grad():
                correct += (model(images).argmax(1) == labels).sum()
    if isinstance(model, Preprocessed) and state is not None:
        model.generator.set_state(state)
    model.train(was_training)
    return int(worker.total(correct)) / len(index)


@dataclass(frozen=True)
class Check:
    """Accuracies of the model in training on a few validation images: under PGD, and under FGSM without noise."""

    pgd: float
    fgsm: float
    chance: float = 0.0
    """The accuracy of guessing."""

    def overfitted(self, progress: Progress) -> bool:
        """Whether robust accuracy has collapsed, or never rose, while the accuracy under FGSM is far above it.

        That is catastrophic overfitting (Wong et al. 2020): the network has learned to defeat the single step
        it is trained on, and nothing else. An unlucky moment of training lowers both.
        """
        if self.fgsm <= 2 * self.chance or self.pgd >= self.fgsm / 2:
            return False
        never_rose = self.fgsm >= HIGH and self.pgd < LOW * self.fgsm
        return never_rose or self.pgd < COLLAPSED * (progress.robust or 0.0)

    def good(self, progress: Progress) -> bool:
        """Whether the weights are worth falling back to: about as robust as any before, and not by guessing.

        However far the accuracy under FGSM is above: a run may overfit from early on, and the best that it had is
        better than what it collapses to.
        """
        return self.pgd > 2 * self.chance and self.pgd >= GOOD * (progress.robust or 0.0)


def check(
    model: nn.Module,
    dataset: Dataset,
    held_out: Int[Tensor, " n"],
    attack: PGD,
    *,
    seed: int,
    worker: Worker,
    precision: torch.dtype,
) -> Check:
    """The check of a model in training, under `attack` and under FGSM of the same budget."""
    few = held_out[:GUARD_IMAGES]
    single = FGSM(threat=attack.threat, eot=attack.eot, max_batch=attack.max_batch)
    pgd, fgsm = (
        accuracy(model, dataset, few, attack=one, seed=seed, worker=worker, precision=precision)
        for one in (attack, single)
    )
    return Check(pgd, fgsm, 1 / len(dataset.classes))
