"""How often a model is right: what epochs are chosen by, and what a run says of itself at its end."""

import torch
from jaxtyping import Int
from torch import Tensor, nn

from menet.attacks import PGD
from menet.data import Dataset
from menet.distributed import Worker
from menet.preprocessed import Preprocessed
from menet.seeding import Stream, stream, stream_seed
from menet.training.precision import autocast

BATCH = 500


def accuracy(
    model: nn.Module,
    dataset: Dataset,
    index: Int[Tensor, " n"] | None = None,
    *,
    seed: int = 0,
    attack: PGD | None = None,
    place: Worker | None = None,
    precision: torch.dtype = torch.float32,
) -> float:
    """The share of images (at `index`, or all) that the model names rightly, with one mask each.

    With an attack, of attacked images. Batches have seeds of their own, so it does not depend on the number of
    processes, which share them out. The model's mode and generator are afterwards as before. It is a quick
    figure, not the project's evaluation: that is `menet.evaluation`.
    """
    place = Worker() if place is None else place
    index = torch.arange(len(dataset)) if index is None else index
    was_training = model.training
    state = model.generator.get_state() if isinstance(model, Preprocessed) else None
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=place.device)
    for number, block in enumerate(index.split(BATCH)):
        if number % place.world != place.rank:
            continue
        if isinstance(model, Preprocessed):
            model.reseed(stream_seed(seed, Stream.SCORE, number))
        images, labels = (tensor.to(place.device) for tensor in dataset.batch(block))
        with autocast(precision, place.device):
            if attack is not None:
                generator = stream(seed, Stream.ATTACK, number)
                images = attack(model, images, labels, generator=generator).images
            with torch.no_grad():
                right += (model(images).argmax(1) == labels).sum()
    if isinstance(model, Preprocessed) and state is not None:
        model.generator.set_state(state)
    model.train(was_training)
    return int(place.total(right)) / len(index)
