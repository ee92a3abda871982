"""Which images a run trains and validates on, in which order, their augmentation, and batches made ahead."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from menet import data
from menet.data import Dataset
from menet.data.dataset import stratified, warn_of_missing_classes
from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.preprocessed import Preprocessed
from menet.seeding import Stream, stream
from menet.training.config import TrainingConfig
from menet.training.prepared import Prepared, open_prepared

SPLIT_SEED = 0
"""The split does not depend on a run's seed: runs that differ by seed alone hold out the same images."""


@dataclass(frozen=True)
class Batches:
    """The training images at `chosen`, the validation images at `held_out`, and how batches are made."""

    config: TrainingConfig
    dataset: Dataset
    chosen: Int[Tensor, " n"]
    held_out: Int[Tensor, " m"]
    prepared: Prepared | None

    @classmethod
    def of(cls, config: TrainingConfig, root: str | Path | None = None, world: int = 1) -> "Batches":
        """Load the training set and split it; refuse a batch size that cannot be filled."""
        dataset = data.load(config.dataset, "train", root)
        prepared = None
        count = len(dataset)
        if config.prepared is not None:
            prepared = open_prepared(config.prepared, dataset, config.defense)
            count = len(prepared)
            dataset = dataset.sample(count)
        shuffled = torch.randperm(count, generator=stream(SPLIT_SEED, Stream.SPLIT))
        validation = config.held_out(count)
        if validation >= count:
            raise ConfigurationError(
                f"expected validation < {count}, the number of training images of {config.dataset}, got "
                f"{config.validation}; hold out fewer, or a fraction such as 0.1"
            )
        held_out, chosen = shuffled[:validation], shuffled[validation:]
        if config.limit is not None and config.limit > len(chosen):
            raise ConfigurationError(
                f"expected limit <= {len(chosen)}, the training images of {config.dataset} "
                f"without {len(held_out)} for validation, got {config.limit}"
            )
        if config.limit is not None:
            # In a fixed order, so that the sample is that of a prepared set where nothing is held out.
            chosen = chosen.sort().values
            chosen = chosen[stratified(dataset.labels[chosen], config.limit)]
        warn_of_missing_classes(dataset.at(chosen), 0, len(chosen), f"the {len(chosen)} training images")
        if config.batch_size > len(chosen):
            raise ConfigurationError(
                f"expected batch_size <= {len(chosen)}, the number of training images, got {config.batch_size}"
                + (f"; {len(held_out)} more are held out for validation" if len(held_out) else "")
            )
        if config.batch_size % world:
            raise ConfigurationError(
                f"expected a batch_size that is a multiple of the {world} processes, got {config.batch_size}"
            )
        return cls(config, dataset, chosen, held_out, prepared)

    def describe(self, test: Dataset) -> str:
        """What the images are used for, in one line."""
        divided = " (split by a hash of the file names)" if test.total is not None else ""
        return (
            f"{self.config.dataset}: {len(self.chosen):,} training, {len(self.held_out):,} validation and "
            f"{len(test):,} test images{divided}; {self.steps:,} steps of {self.config.batch_size} in an epoch"
        )

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return len(self.chosen) * self._copies // self.config.batch_size

    @property
    def _copies(self) -> int:
        """The estimates of each image that an epoch shows."""
        return self.prepared.copies if self.prepared is not None and self.config.every_copy else 1

    def order(self, epoch: int) -> Int[Tensor, " n"]:
        """The order of an epoch's images, with one or (`every_copy`) all estimates of each in a prepared set.

        It follows from the seed and the epoch alone, so a run can resume in the middle of an epoch.
        """
        generator = stream(self.config.seed, Stream.ORDER, epoch)
        positions = self.chosen[torch.randperm(len(self.chosen), generator=generator)]
        if self.prepared is None:
            return positions
        if self._copies > 1:
            every = (positions[:, None] * self._copies + torch.arange(self._copies)).flatten()
            return every[torch.randperm(len(every), generator=generator)]
        copies = torch.randint(self.prepared.copies, positions.shape, generator=generator)
        return positions * self.prepared.copies + copies

    def batch(
        self, order: Int[Tensor, " n"], number: int, generator: torch.Generator, worker: Worker
    ) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"]]:
        """This worker's part of an epoch's batch `number`.

        Augmentation is drawn for the whole batch, so it does not depend on the number of workers.
        """
        index = order[number * self.config.batch_size : (number + 1) * self.config.batch_size]
        source = self.dataset if self.prepared is None else self.prepared.dataset
        augmented = self.config.augmentation
        images, labels = source.batch(
            index if augmented else worker.part(index),
            (lambda pixels: worker.part(crop_and_flip(pixels, generator=generator))) if augmented else None,
        )
        labels = worker.part(labels) if augmented else labels
        return images.to(worker.device, memory_format=self.layout), labels.to(worker.device)

    @property
    def layout(self) -> torch.memory_format:
        """The memory format of images."""
        return torch.channels_last if self.config.channels_last else torch.contiguous_format

    @contextmanager
    def ahead(
        self,
        epoch: int,
        first: int,
        generators: Mapping[str, torch.Generator],
        worker: Worker,
        defense: Preprocessed | None = None,
    ) -> Iterator[Iterator[tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"]]]]:
        """The batches of an epoch from `first` on, each made in a thread while the one before is trained on.

        With a `defense` (see `estimated_ahead`) they are its estimates. The thread draws from copies of
        `generators`, and each of these is set to the state it has after a batch when that batch is taken. So a
        checkpoint holds what was used, whatever the thread has done since, and results do not depend on timing.
        Where the network takes all cores itself, a thread beside it would slow each of its parallel parts down to
        the slower core: then batches are made in between, by all cores.
        """
        order = self.order(epoch)
        copies = {name: torch.Generator().set_state(one.get_state()) for name, one in generators.items()}
        view = None
        if defense is not None:
            view = defense.with_gradient(defense.gradient)
            view.generator, view.training = copies["model"], True

        def make(number: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            images, labels = self.batch(order, number, copies["augmentation"], worker)
            if view is not None:
                with torch.no_grad():
                    images = view.reconstruct(images).contiguous(memory_format=self.layout)
            return images, labels, {name: one.get_state() for name, one in copies.items()}

        def take(pool: ThreadPoolExecutor | None) -> Iterator[tuple[Tensor, Tensor]]:
            waiting: Future[tuple[Tensor, Tensor, dict[str, Tensor]]] | None = None
            for number in range(first, self.steps):
                if pool is None:
                    images, labels, states = make(number)
                else:
                    current = pool.submit(make, number) if waiting is None else waiting
                    images, labels, states = current.result()
                    waiting = pool.submit(make, number + 1) if number + 1 < self.steps else None
                for name, state in states.items():
                    generators[name].set_state(state)
                yield images, labels

        threads = torch.get_num_threads()
        if worker.device.type == "cpu" and threads >= (os.cpu_count() or 1):
            yield take(None)
            return
        # One torch thread for the thread: the network has the others, and gives up little of one core for it.
        pool = ThreadPoolExecutor(1, "menet-batches", torch.set_num_threads, (1,))
        try:
            pool.submit(torch.get_num_threads).result()
            # Torch's thread count is per thread, but MKL's is per process: the initializer has changed it.
            torch.set_num_threads(threads)
            yield take(pool)
        finally:
            pool.shutdown(cancel_futures=True)


def estimated_ahead(config: TrainingConfig, model: nn.Module) -> Preprocessed | None:
    """The defense of `model` if its estimates can be made ahead of a step, else None.

    They cannot where an attack needs the defense itself, where training changes the preprocessing, or where the
    defense has to know which images it is given (a bank of masks).
    """
    if config.objective != "standard" or config.prepared is not None or not isinstance(model, Preprocessed):
        return None
    if getattr(model, "bank", None) is not None:
        return None
    inside = {id(weight) for weight in model.classifier.parameters()}
    learned = any(weight.requires_grad and id(weight) not in inside for weight in model.parameters())
    return None if learned else model


def crop_and_flip(
    images: Shaped[Tensor, "b c h w"],
    *,
    generator: torch.Generator,
    padding: int = 4,
    flip: bool = True,
) -> Shaped[Tensor, "b c h w"]:
    """Pad by `padding` black pixels, crop at a random offset, and flip horizontally with probability 1/2.

    This is the paper's augmentation (appendix, training details). Each image has its own draws. They come from
    `generator`, on its own device, in an order that depends only on the number of images, so the same generator
    gives the same crops on a CPU and on a GPU.
    """
    if padding < 0:
        raise ConfigurationError(f"expected padding >= 0, got {padding}")
    count, channels, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=generator.device)
    coins = torch.randint(2, (count, 1), generator=generator, device=generator.device)
    top, left = offsets.to(images.device)
    mirrored = coins.to(images.device).bool() & flip

    rows = top + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    padded = torch.nn.functional.pad(images, [padding] * 4)
    # One flat lookup shared by the channels is several times faster on a CPU than indexing four dimensions.
    stride = width + 2 * padding
    lookup = (rows[:, :, None] * stride + columns[:, None, :]).flatten(1)
    cropped = padded.flatten(2).gather(2, lookup[:, None, :].expand(-1, channels, -1))
    return cropped.unflatten(2, (height, width))
