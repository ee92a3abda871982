"""Batches of 256 augmented CIFAR-10 images, shuffled, against what training may have to wait for.

The bar is 20,000 images/s on two cores. Where CIFAR-10 is not here, random bytes of the same shape stand in:
the time does not depend on what the images show.
"""

import time
from functools import partial

import torch

from menet.data import Dataset, load
from menet.data.cifar10 import CLASSES, MEAN, STD
from menet.errors import DataError
from menet.training.batches import crop_and_flip

BATCH = 256
BAR = 20_000
SECONDS = 3.0


def main() -> None:
    """Print images per second, gathered and augmented, and how they stand to the bar."""
    dataset, what = _images()
    print(f"data: batches of {BATCH} from {what}")
    every = torch.get_num_threads()
    for threads in sorted({1, every}):
        torch.set_num_threads(threads)
        for label, augmented in (("gathered", False), ("gathered, cropped, flipped", True)):
            rate = images_per_second(dataset, augmented)
            speed = f"{rate:>9,.0f} images/s  {rate / BAR:5.1f} × the bar of {BAR:,}"
            print(f"  {label:<27} {threads} thread(s) {speed}")
    torch.set_num_threads(every)


def images_per_second(dataset: Dataset, augmented: bool, seconds: float = SECONDS) -> float:
    """Passes over shuffled batches until the time is up; the first batches are not counted."""
    generator = torch.Generator().manual_seed(0)
    augment = partial(crop_and_flip, generator=generator)
    order = torch.randperm(len(dataset), generator=generator)
    done, started = 0, time.perf_counter()
    for number in range(1_000_000):
        if number == 20:
            done, started = 0, time.perf_counter()
        at = number * BATCH % (len(order) - BATCH)
        images, _ = dataset.batch(order[at : at + BATCH], augment if augmented else None)
        done += len(images)
        if number >= 20 and time.perf_counter() - started > seconds:
            break
    return done / (time.perf_counter() - started)


def _images() -> tuple[Dataset, str]:
    try:
        return load("cifar10", "train"), "CIFAR-10"
    except DataError:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.zeros(len(images), dtype=torch.int64)
        return Dataset("made", "train", images, labels, CLASSES, MEAN, STD), "random bytes shaped like CIFAR-10"


if __name__ == "__main__":
    main()
