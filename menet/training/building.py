"""From a configuration to a model, its averaged weights, an optimizer and a precision."""

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from menet import models
from menet.data import Dataset
from menet.distributed import Worker
from menet.linalg import has_bfloat16
from menet.preprocessed import Preprocessed, classifier_channels, rebuild
from menet.seeding import Stream, stream, stream_seed
from menet.training.config import Precision, TrainingConfig


def build_model(
    config: TrainingConfig,
    dataset: Dataset,
    worker: Worker | None = None,
    *,
    chosen: Tensor | None = None,
    fitted: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
) -> nn.Module:
    """The network for a dataset's images behind the configured defense; all randomness follows from the seed.

    A defense that is fitted to images is fitted to those at `chosen` (all if None), unless `fitted` gives the
    settings of one whose state is loaded afterwards. Where fitting takes long it resumes from `checkpoint`.
    """
    worker = Worker() if worker is None else worker
    channels = classifier_channels(dataset.images.shape[1], config.defense)
    weights = stream(config.seed, Stream.WEIGHTS)
    network = models.build(config.model, dataset, channels=channels, generator=weights)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = rebuild(network, config.defense if fitted is None else fitted).to(worker.device)
    if isinstance(model, Preprocessed):
        if fitted is None:
            images = dataset.images if chosen is None else _Subset(dataset.images, chosen)
            fit_defense(model, images, config.seed, checkpoint)
        model.reseed(stream_seed(config.seed, Stream.MASKS))
        model.shard = (worker.rank, worker.world)
    return model


def fit_defense(model: Preprocessed, images: Any, seed: int, checkpoint: Path | None = None) -> None:
    """Fit a defense to training images; where that takes long it resumes from `checkpoint`."""
    resumes = checkpoint is not None and "checkpoint" in inspect.signature(model.fit).parameters
    model.fit(images, stream(seed, Stream.FIT), **({"checkpoint": checkpoint} if resumes else {}))


@dataclass(frozen=True)
class _Subset:
    """Some of a dataset's images, read when they are indexed."""

    images: Any
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Tensor) -> Any:
        return self.images[self.chosen[index]]


def build_optimizer(config: TrainingConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all trainable weights; the loop sets its learning rate at each step."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(weights, config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        weights, config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )


def averaged_copy(config: TrainingConfig, model: nn.Module) -> nn.Module | None:
    """A copy of `model` to hold the moving average of its weights; None without averaging."""
    if not config.ema:
        return None
    return copy.deepcopy(model).requires_grad_(False)


def update_average(averaged: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Move the averaged weights towards those of `model`, after training step `step` (from 1).

    Batch-norm statistics are averaged with the weights. Recomputing them would take another pass over the data,
    under attack where training is adversarial; the average follows the weights at no cost, and is the same
    whenever a run is interrupted. The decay is min(decay, (1 + step) / (10 + step)): an average over the whole
    run so far while that is shorter than the decay's own horizon.
    """
    decay = min(decay, (1 + step) / (10 + step))
    with torch.no_grad():
        ours, theirs = averaged.state_dict(), model.state_dict()
        floating = [name for name, value in ours.items() if value.is_floating_point()]
        torch._foreach_lerp_([ours[name] for name in floating], [theirs[name] for name in floating], 1 - decay)
        for name in ours.keys() - set(floating):
            ours[name].copy_(theirs[name])


def number_type(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype for `precision` on `device`.

    `auto` is bfloat16 only where the processor has instructions for it: a CPU without them emulates it, which
    is slower than float32.
    """
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which layers compute in `dtype`; weights and estimators stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
