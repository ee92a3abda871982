"""From a configuration to modules, objectives and optimizers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from menet import models
from menet.data import Dataset
from menet.distributed import Worker
from menet.preprocessed import Preprocessed, classifier_channels, rebuild
from menet.seeding import Stream, stream, stream_seed
from menet.training.adversarial import Adversarial, Trades, attack_of
from menet.training.config import TrainingConfig
from menet.training.standard import Standard

Objective = Standard | Adversarial | Trades


def build_model(
    config: TrainingConfig,
    dataset: Dataset,
    place: Worker | None = None,
    *,
    chosen: Tensor | None = None,
    fitted: dict[str, Any] | None = None,
) -> nn.Module:
    """The network for a dataset's images behind the configured defense, its weights and masks by the seed.

    A defense that learns from images does so from those at `chosen` (all if None), unless `fitted` gives the
    settings of one that has learned and whose state is to be loaded.
    """
    place = Worker() if place is None else place
    channels = classifier_channels(dataset.images.shape[1], config.defense)
    weights = stream(config.seed, Stream.WEIGHTS)
    network = models.build(config.model, dataset, channels=channels, generator=weights)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = rebuild(network, config.defense if fitted is None else fitted)
    if isinstance(model, Preprocessed):
        if fitted is None:
            images = dataset.images if chosen is None else _Chosen(dataset.images, chosen)
            model.fit(images, stream(config.seed, Stream.FIT))
        model.reseed(stream_seed(config.seed, Stream.MASKS))
        model.share = (place.rank, place.world)
    return model.to(place.device)


@dataclass(frozen=True)
class _Chosen:
    """Some of a dataset's images, read when they are asked for."""

    images: Any
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Tensor) -> Any:
        return self.images[self.chosen[index]]


def build_objective(config: TrainingConfig, place: Worker) -> Objective:
    """The small function from a batch to its loss."""
    if config.objective == "adversarial":
        return Adversarial(attack_of(config, place))
    if config.objective == "trades":
        return Trades(attack_of(config, place), config.beta)
    return Standard(prepared=config.prepared is not None)


def build_optimizer(config: TrainingConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; its rate is set anew at each step."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(weights, config.rate, weight_decay=config.weight_decay)
    return torch.optim.SGD(weights, config.rate, momentum=config.momentum, weight_decay=config.weight_decay)
