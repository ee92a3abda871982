"""Attacking a part of a dataset so that it can be stopped and resumed."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from menet.attacks.base import Attack
from menet.attacks.kinds import Model
from menet.attacks.result import AttackResult
from menet.errors import ConfigurationError
from menet.progress import reporting
from menet.seeding import derive


@runtime_checkable
class Examples(Protocol):
    """A dataset as far as attacks need one: `menet.data.Dataset` is one."""

    def __len__(self) -> int: ...

    def batch(self, index: Any) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class TensorExamples:
    """Images and labels held in memory, as `Examples`."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, index: slice) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


@dataclass(frozen=True)
class AttackedBatch:
    """The outcome for the examples `start` to `stop` of the dataset."""

    start: int
    stop: int
    labels: Tensor
    result: AttackResult


def attack_range(
    attack: Attack,
    model: Model,
    examples: Examples,
    start: int = 0,
    stop: int | None = None,
    *,
    batch: int = 100,
    seed: int = 0,
    trace: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[AttackedBatch]:
    """Attack the examples `start` to `stop`, batch by batch; stop at any time, resume from any example.

    Outcomes do not depend on where ranges begin and end: batches lie at multiples of `batch`, each has a
    random stream of its own made from `seed` and its place, and a model with `reseed` is reseeded from the
    same before each. A range that cuts a batch pays for all of it.
    """
    stop = len(examples) if stop is None else stop
    if not 0 <= start <= stop <= len(examples):
        raise ConfigurationError(f"range is {start} to {stop}; accepted are ranges within 0 to {len(examples)}")
    if batch < 1:
        raise ConfigurationError(f"batch is {batch}; it must be 1 or more")
    with reporting(type(attack).__name__, stop - start) as progress:
        for first in range(start - start % batch, stop, batch):
            end = min(first + batch, len(examples))
            images, labels = examples.batch(slice(first, end))
            # Two streams: with one, a random start would follow the masks the model is about to draw.
            stream = derive(seed, first)
            if hasattr(model, "reseed"):
                model.reseed(derive(stream, 0))
            result = attack(
                model,
                images.to(device),
                labels.to(device),
                generator=torch.Generator().manual_seed(derive(stream, 1)),
                trace=trace,
            )
            part = slice(max(start, first) - first, min(stop, end) - first)
            yield AttackedBatch(first + part.start, first + part.stop, labels[part], _part_of(result, part))
            progress.advance(part.stop - part.start)


def _part_of(result: AttackResult, part: slice) -> AttackResult:
    kept = {}
    for field in fields(result):
        value = getattr(result, field.name)
        if value is not None:
            kept[field.name] = value[:, part] if field.name in ("trace", "restarts") else value[part]
    return AttackResult(**kept)
