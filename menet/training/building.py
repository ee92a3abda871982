"""From a configuration to modules, objectives and optimizers."""

import torch
from torch import nn

from menet import models
from menet.data import Dataset
from menet.preprocessed import Preprocessed, classifier_channels, rebuild
from menet.training.adversarial import Adversarial, Trades, attack_of
from menet.training.config import TrainingConfig
from menet.training.distributed import Place
from menet.training.standard import Standard
from menet.training.streams import Purpose, seed_for, stream

Objective = Standard | Adversarial | Trades


def build_model(config: TrainingConfig, dataset: Dataset, place: Place | None = None) -> nn.Module:
    """The network for a dataset's images behind the configured defense, its weights and masks by the seed."""
    place = Place() if place is None else place
    channels = classifier_channels(dataset.images.shape[1], config.defense)
    weights = stream(config.seed, Purpose.WEIGHTS)
    network = models.build(config.model, dataset, channels=channels, generator=weights)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = rebuild(network, config.defense)
    if isinstance(model, Preprocessed):
        model.fit(dataset.images, stream(config.seed, Purpose.FIT))
        model.reseed(seed_for(config.seed, Purpose.MASKS))
        model.share = (place.rank, place.world)
    return model.to(place.device)


def build_objective(config: TrainingConfig, place: Place) -> Objective:
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
