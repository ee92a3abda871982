"""What a graph will cost before it runs: time on this machine, GPU-hours and disk, from counted operations.

Operations of a network are counted, not guessed; the speed of this machine is measured in a fraction of a second.
That of a GPU and of the estimators are the constants below. Expect the order of magnitude, not the minute.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from menet import models
from menet.experiments.jobs import Certify, Evaluate, Job, Prepare, Train
from menet.experiments.measures import Cost, Vectors

GPU_SPEED = 1.0e13
"""Operations per second that a data-centre GPU is taken to reach on these small images, in float32 with TF32."""
GPU_ESTIMATE = 1.0e-5
"""Seconds that a GPU is taken to need for one estimate of an image of 3072 values, in large batches."""
CORE_ESTIMATE = {"usvt": 2e-4, "soft-impute": 7e-4, "nuclear-norm": 5e-4, "tensor": 1.5e-3, "mask-only": 2e-5}
"""Seconds per estimate of 3072 values on one core."""
OVERHEAD = 0.6
"""Seconds a job takes whatever its size: loading the data and the model, writing."""
CALL = {True: 0.04, False: 0.004}
"""Seconds of one core that a pass takes whatever its size, with a preprocessing and without."""
BACKWARD = 3
"""A forward and backward pass, in forward passes."""

SHAPES = {
    "digits": (1, 28, 10, 4_000, 1_000),
    "mnist": (1, 28, 10, 60_000, 10_000),
    "cifar10": (3, 32, 10, 50_000, 10_000),
    "svhn": (3, 32, 10, 73_257, 26_032),
    "tiny-imagenet": (3, 64, 200, 100_000, 10_000),
}
"""Channels, side, classes, images to train on and to test on, as published."""


@dataclass(frozen=True)
class Estimate:
    """The work of a job: operations of networks, estimates of images, and bytes left on disk."""

    operations: float = 0.0
    estimates: float = 0.0
    """In images of 3072 values, times seconds on one core."""
    images: float = 0.0
    disk: float = 0.0
    calls: float = 0.0
    """Seconds of one core that passes take whatever their size."""

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.operations + other.operations,
            self.estimates + other.estimates,
            self.images + other.images,
            self.disk + other.disk,
            self.calls + other.calls,
        )

    def seconds(self, speed: float) -> float:
        """On one core of a machine with so many operations per second."""
        return OVERHEAD + self.operations / speed + self.estimates + self.calls

    def gpu_seconds(self) -> float:
        return self.operations / GPU_SPEED + self.images * GPU_ESTIMATE


def estimate(job: Job) -> Estimate:
    """The work of one job."""
    if isinstance(job, Prepare):
        channels, side, _, training, _ = _shape(job.dataset)
        copies = min(job.limit or training, training) * job.defense["masks"]
        return _estimates(job.defense, job.dataset, copies) + Estimate(disk=copies * channels * side * side)
    if isinstance(job, Train):
        return _training(job)
    if isinstance(job, Evaluate):
        return _evaluation(job)
    if isinstance(job, Certify):
        settings = job.settings
        passes = _examples(job.model, settings.stop) * (settings.selection + settings.estimation)
        return _passes(job.model, passes, passes) + Estimate(disk=300 * _examples(job.model, settings.stop))
    if isinstance(job, Vectors):
        return _passes(job.attacked.model, 2 * job.attacked.pictures, 2 * job.attacked.pictures)
    if isinstance(job, Cost):
        return _estimates(job.defense, job.dataset, job.batch * job.rounds)
    return Estimate()


def total(jobs: Sequence[Job]) -> Estimate:
    """The work of many."""
    return sum((estimate(job) for job in jobs), Estimate())


def speed_of_a_core() -> float:
    """Operations per second of one core, by convolutions of the size these networks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
        images = torch.rand(16, 64, 16, 16, generator=torch.Generator().manual_seed(0))
        operations = 2 * 9 * 64 * 64 * 16 * 16 * len(images)
        best = 0.0
        with torch.no_grad():
            for _ in range(8):
                began = time.perf_counter()
                layer(images)
                best = max(best, operations / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(threads)
    return best


@cache
def forward_operations(network: str, channels: int, side: int, classes: int) -> tuple[int, int]:
    """Operations of one image's forward pass, and the number of parameters."""
    generator = torch.Generator().manual_seed(0)
    built = models.build(network, channels=channels, side=side, classes=classes, generator=generator).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built(torch.zeros(1, channels, side, side))
    return counter.get_total_flops(), sum(one.numel() for one in built.parameters())


def _training(job: Train) -> Estimate:
    config = job.config
    _, _, _, training, _ = _shape(config.dataset)
    images = config.epochs * min(
        job.prepared.limit or training if job.prepared else config.limit or training, training
    )
    attack = config.steps * config.eot if config.objective != "standard" else 0
    passes = images * (attack + 1)
    parameters = _operations(job)[1]
    # Weights, and a checkpoint of weights and momentum.
    calls = passes / config.batch * CALL[bool(config.defense) and job.prepared is None]
    disk = Estimate(disk=3 * 4 * parameters, calls=calls)
    return _passes(job, BACKWARD * passes, 0 if job.prepared else passes) + disk


def _evaluation(job: Evaluate) -> Estimate:
    examples, settings = _examples(job.model, job.examples), job.settings
    forward, drawn = float(2 * job.masks), float(2 * job.masks)
    if job.attack == "spsa":
        forward += settings["steps"] * settings["samples"]
        drawn += settings["steps"] * settings["samples"]
    elif job.attack == "boundary":
        forward += 2 * 10 * settings["steps"]
        drawn += 2 * 10 * settings["steps"]
    else:
        steps = settings.get("steps", 1) * settings.get("eot", 1) * settings.get("restarts", 1)
        forward += BACKWARD * steps
        behind = job.source is not None or job.gray or job.attack == "after-preprocessing"
        drawn += 0 if behind else steps * (3 if job.gradient == "exact" else 1)
    if not job.model.config.defense:
        forward -= 2 * (job.masks - 1)
    row = 500 + 8 * job.masks * 2
    steps = settings.get("steps", 1) * settings.get("restarts", 1)
    calls = (
        -(-examples // job.batch) * (steps + 3) * CALL[drawn > 2 * job.masks and bool(job.model.config.defense)]
    )
    return _passes(job.model, examples * forward, examples * drawn) + Estimate(disk=examples * row, calls=calls)


def _passes(model: Train, forward: float, drawn: float) -> Estimate:
    config = model.config
    work = Estimate(operations=forward * _operations(model)[0])
    return work + _estimates(config.defense, config.dataset, drawn) if config.defense else work


def _estimates(defense: dict[str, Any], dataset: str, count: float) -> Estimate:
    channels, side, *_ = _shape(dataset)
    share = count * channels * side * side / 3072
    seconds = CORE_ESTIMATE.get(defense.get("estimator", {}).get("name", ""), 1e-3)
    return Estimate(estimates=share * seconds, images=share)


def _operations(model: Train) -> tuple[int, int]:
    channels, side, classes, *_ = _shape(model.config.dataset)
    levels = model.config.defense.get("levels", 1) if model.config.defense.get("name") == "thermometer" else 1
    return forward_operations(model.config.model, channels * levels, side, classes)


def _examples(model: Train, examples: int | None) -> int:
    testing = _shape(model.config.dataset)[4]
    return min(examples or testing, testing)


def _shape(dataset: str) -> tuple[int, int, int, int, int]:
    return SHAPES.get(dataset, SHAPES["tiny-imagenet"])
