"""Accuracy during training: what epochs are selected by, and what a run reports at its end."""

import torch
from jaxtyping import Int
from torch import Tensor, nn

from menet.attacks import PGD
from menet.data import Dataset
from menet.distributed import Worker
from menet.preprocessed import Preprocessed
from menet.seeding import Stream, stream, stream_seed
from menet.training.building import autocast

BATCH_SIZE = 500


def accuracy(
    model: nn.Module,
    dataset: Dataset,
    index: Int[Tensor, " n"] | None = None,
    *,
    seed: int = 0,
    attack: PGD | None = None,
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
