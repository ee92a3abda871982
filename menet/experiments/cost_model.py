"""A cost model of jobs: time on this machine, GPU-hours and disk space, before anything has run.

The operations of a network are counted and the speed of this machine is measured, in a fraction of a second; the
speeds of a GPU and of the estimators are the constants below. Expect the right order of magnitude, no more.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from menet import models
from menet.attacks import SmallestPGD
from menet.attacks.losses import MAX_BATCH
from menet.attacks.standard import PASSES
from menet.baselines import PixelCNN, PixelCNNPlusPlus
from menet.baselines.image_quilting import places
from menet.baselines.pixel_cnn import PLUS_BATCH, PLUS_PASS, CausalConvolution
from menet.baselines.pixel_cnn_plus import Convolution
from menet.baselines.wgan import BATCH_SIZE, CRITIC_STEPS, Critic, Generator
from menet.experiments.jobs import Certify, Evaluate, EvaluatePart, Job, Prepare, Train
from menet.experiments.measures import EstimationError, FeatureVectors, Redistributed, Timing

GPU_SPEED = 1.0e13
"""Assumed operations per second of a data-center GPU on these small images, in float32 with TF32."""
GPU_HALF_SPEED = 2.5e13
"""The same in bfloat16: 116 minutes for 100 epochs of 10-step adversarial training (FastAT benchmark)."""
GPU_CONTEXT = 0.7e9
"""Bytes of GPU memory that a process takes before it computes anything."""
CORE_SPEED = 3.0e10
"""Operations per second of a core that plans assume, where they must not depend on the machine."""
GPU_ESTIMATION = 1.0e-5
"""Assumed seconds on a GPU to estimate one image of 3072 values, in large batches."""
CORE_ESTIMATION = {"usvt": 2e-4, "soft-impute": 7e-4, "nuclear-norm": 5e-4, "tubal": 1.5e-3, "mask-only": 2e-5}
"""Seconds on one core to estimate one image of 3072 values, by estimator."""
JOB_OVERHEAD = 0.6
"""Seconds per job of any size: loading the data and the model, writing."""
PASS_OVERHEAD = {True: 0.04, False: 0.004}
"""Seconds of one core per pass of any size, with preprocessing and without."""
ESTIMATION_COPIES = 24
"""Copies of an image that estimating it, with a gradient, holds in memory."""
SECONDS_PER_CALL = 1.0e-5
"""Seconds of a call of torch on little data."""
CALLS_PER_LAYER = 8
"""Calls for one pixel in one layer of an autoregressive network."""
CRITIC_PASSES = 12
"""The cost of one step of a critic with gradient penalty, in its forward passes."""
FORWARD_AND_BACKWARD = 3
"""The cost of a forward and backward pass, in forward passes."""

SHAPES = {
    "digits": (1, 28, 10, 4_000, 1_000),
    "mnist": (1, 28, 10, 60_000, 10_000),
    "cifar10": (3, 32, 10, 50_000, 10_000),
    "svhn": (3, 32, 10, 73_257, 26_032),
    "tiny-imagenet": (3, 64, 200, 100_000, 10_000),
}
"""Channels, side, classes, training images and test images, as published."""


@dataclass(frozen=True)
class Cost:
    """The cost of a job."""

    operations: float = 0.0
    """Floating-point operations of networks, in float32."""
    half_operations: float = 0.0
    """The same in bfloat16."""
    estimation_seconds: float = 0.0
    """Seconds of one core for matrix estimation."""
    images_estimated: float = 0.0
    """In images of 3072 values."""
    disk: float = 0.0
    """Bytes."""
    overhead_seconds: float = 0.0
    """Seconds of one core for passes of any size."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def seconds(self, speed: float) -> float:
        """On one core of `speed` operations per second."""
        operations = self.operations + self.half_operations
        return JOB_OVERHEAD + operations / speed + self.estimation_seconds + self.overhead_seconds

    def gpu_seconds(self) -> float:
        networks = self.operations / GPU_SPEED + self.half_operations / GPU_HALF_SPEED
        return networks + self.images_estimated * GPU_ESTIMATION

    def __mul__(self, factor: float) -> "Cost":
        return Cost(*(getattr(self, one.name) * factor for one in fields(self)))


def cost_of(job: Job) -> Cost:
    """The cost of one job."""
    if isinstance(job, Prepare):
        channels, side, _, training, _ = _shape(job.dataset)
        images = min(job.limit or training, training) * job.defense["masks"]
        return _estimation(job.defense, job.dataset, images) + Cost(disk=images * channels * side * side)
    if isinstance(job, Train):
        return _training(job)
    if isinstance(job, EvaluatePart):
        return _evaluation(job.whole) * (1 / job.of)
    if isinstance(job, Evaluate):
        # Gathering the rows of parts takes no more than their space.
        return Cost(disk=_evaluation(job).disk) if job.parts else _evaluation(job)
    if isinstance(job, Certify):
        examples = _examples(job.model, job.settings.stop)
        draws = job.settings.selection + job.settings.estimation
        passes = examples * (draws if job.model.config.defense else 1)
        return _passes(job.model, passes, passes) + Cost(disk=300 * examples)
    if isinstance(job, FeatureVectors):
        passes = 2 * job.attacked.snapshots
        return _passes(job.attacked.model, passes, passes)
    if isinstance(job, Timing):
        return _estimation(job.defense, job.dataset, job.batch_size * job.rounds)
    if isinstance(job, EstimationError):
        testing = _shape(job.dataset)[4]
        return _estimation(job.defense, job.dataset, min(job.examples or testing, testing))
    return Cost()


def at_hand(job: Job, counts: Mapping[str, tuple[int, int]]) -> Job:
    """A job as `cost_of` should count it where datasets have only so many training and test images."""

    def most(dataset: str, split: int, wanted: int | None) -> int | None:
        there = counts.get(dataset, (math.inf, math.inf))[split]
        return wanted if there >= (wanted or math.inf) else int(there)

    def prepares(job: Prepare) -> Prepare:
        return replace(job, limit=most(job.dataset, 0, job.limit))

    def evaluates(job: Evaluate) -> Evaluate:
        return replace(job, examples=most(job.model.config.dataset, 1, job.examples))

    if isinstance(job, Prepare):
        return prepares(job)
    if isinstance(job, Train):
        config, prepared = job.config, job.prepared
        config = replace(config, limit=most(config.dataset, 0, config.limit))
        return replace(job, config=config, prepared=prepared and prepares(prepared))
    if isinstance(job, EvaluatePart):
        return replace(job, whole=evaluates(job.whole))
    if isinstance(job, Evaluate):
        return evaluates(job)
    if isinstance(job, Certify):
        stop = most(job.model.config.dataset, 1, job.settings.stop)
        return replace(job, settings=replace(job.settings, stop=stop))
    if isinstance(job, EstimationError):
        return replace(job, examples=most(job.dataset, 1, job.examples))
    return job


def memory_of(job: Job) -> float:
    """Bytes of GPU memory that a job needs: its context, weights, and what a backward pass keeps of a batch."""
    if isinstance(job, EvaluatePart):
        return memory_of(job.whole)
    if isinstance(job, Evaluate) and job.parts:
        return 0.0
    if isinstance(job, Train):
        config = job.config
        weights = 3 + (config.optimizer == "adamw") + bool(config.ema)
        estimated = config.batch_size if config.defense and job.prepared is None else 0
        needed = _memory(job, weights, config.batch_size, estimated)
        if config.defense.get("name") == "pixel-defend":
            # Its own training comes first: weights, gradients, moments, average and best.
            _, parameters, kept, _ = _likelihood(config.defense, config.dataset)
            needed = max(needed, GPU_CONTEXT + 4 * (6 * parameters + 3 * PLUS_PASS * kept))
        return needed
    if isinstance(job, Evaluate):
        settings = job.settings
        together = min(job.max_batch, job.batch_size * settings.get("eot", 1))
        return _memory(job.model, 2 if job.surrogate is None else 3, together, job.max_batch)
    if isinstance(job, Certify | FeatureVectors | Redistributed):
        model = next(one for one in (*job.needs, *job.needs[0].needs) if isinstance(one, Train))
        return _memory(model, 1, 0, MAX_BATCH)
    return GPU_CONTEXT if isinstance(job, Prepare | Timing | EstimationError) else 0.0


def hours_of(job: Job, *, gpu: bool) -> float:
    """Estimated hours on a GPU or on a core, the same on every machine."""
    cost = cost_of(job)
    return (cost.gpu_seconds() if gpu else cost.seconds(CORE_SPEED)) / 3600


def parts_of(job: Evaluate, most_hours: float, *, gpu: bool) -> int:
    """How many parts of at most so many hours an evaluation splits into; a part is at least one batch."""
    batches = -(-_examples(job.model, job.examples) // job.batch_size)
    return max(1, min(batches, math.ceil(hours_of(job, gpu=gpu) / most_hours)))


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
def forward_operations(network: str, channels: int, side: int, classes: int) -> tuple[int, int, int]:
    """Operations of one image's forward pass, the number of parameters, and values that a backward pass keeps."""
    generator = torch.Generator().manual_seed(0)
    built = models.build(network, channels=channels, side=side, classes=classes, generator=generator).eval()
    kept = 0

    def count(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        nonlocal kept
        kept += output.numel()

    for module in built.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built(torch.zeros(1, channels, side, side))
    return counter.get_total_flops(), sum(one.numel() for one in built.parameters()), kept


@cache
def likelihood_operations(channels: int, side: int, **settings: Any) -> tuple[int, int, int, int]:
    """Of PixelDefend's network: operations of one image's pass, parameters, values kept, and layers."""
    plus = settings.pop("likelihood") == "pixel-cnn++"
    network = (PixelCNNPlusPlus if plus else PixelCNN)(channels, **settings).eval()
    kept = layers = 0

    def count(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        nonlocal kept, layers
        kept, layers = kept + output.numel(), layers + 1

    for module in network.modules():
        if isinstance(module, Convolution | CausalConvolution):
            module.register_forward_hook(count)
    images = torch.zeros(1, channels, side, side)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.mixture(images) if isinstance(network, PixelCNNPlusPlus) else network(images)
    return counter.get_total_flops(), sum(one.numel() for one in network.parameters()), kept, layers


def _likelihood(defense: dict[str, Any], dataset: str) -> tuple[int, int, int, int]:
    channels, side, *_ = _shape(dataset)
    names = ("likelihood", "levels", "width", "layers", "mixtures")
    defaults = {"likelihood": "pixel-cnn"}
    settings = {name: defense[name] for name in names if name in defense}
    return likelihood_operations(channels, side, **{**defaults, **settings})


@cache
def gan_operations(channels: int, side: int, latent: int = 64, features: int = 16) -> tuple[int, int, int]:
    """Operations of the generator of Defense-GAN for one image, of its critic, and their parameters."""
    network = Generator(channels, side, side, latent, features)
    critic = Critic(channels, side, side, features)
    counts = []
    for part, given in ((network, torch.zeros(1, latent)), (critic, torch.zeros(1, channels, side, side))):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            part(given)
        counts.append(counter.get_total_flops())
    return counts[0], counts[1], sum(one.numel() for part in (network, critic) for one in part.parameters())


def _gan(defense: dict[str, Any], dataset: str) -> tuple[int, int, int]:
    channels, side, *_ = _shape(dataset)
    return gan_operations(channels, side, **{k: defense[k] for k in ("latent", "features") if k in defense})


def _fitting(defense: dict[str, Any], dataset: str) -> Cost:
    """Training the generative model of a defense, for as many steps as it may take."""
    if defense.get("name") == "defense-gan":
        generator, critic, parameters = _gan(defense, dataset)
        images = defense.get("gan_steps", 2000) * BATCH_SIZE
        a_step = CRITIC_STEPS * (CRITIC_PASSES * critic + generator) + FORWARD_AND_BACKWARD * (generator + critic)
        return Cost(half_operations=images * a_step, disk=4 * 3 * parameters)
    if defense.get("name") != "pixel-defend":
        return Cost()
    operations, parameters, _, _ = _likelihood(defense, dataset)
    images = defense.get("steps", 500) * (PLUS_BATCH if defense.get("likelihood") == "pixel-cnn++" else 32)
    # Weights, their average, the best of them, and two moments.
    return Cost(operations=FORWARD_AND_BACKWARD * images * operations, disk=4 * 5 * parameters)


def _training(job: Train) -> Cost:
    config = job.config
    _, _, _, training, _ = _shape(config.dataset)
    limit = job.prepared.limit if job.prepared else config.limit
    images = config.epochs * min(limit or training, training) * job.copies
    attack = {"standard": 0, "n-fgsm": config.eot}.get(config.objective, config.steps * config.eot)
    passes = images * (attack + 1)
    preprocessed = bool(config.defense) and job.prepared is None
    overhead = Cost(
        # Weights, and a checkpoint of weights and momentum.
        disk=3 * 4 * _operations(job)[1],
        overhead_seconds=passes / config.batch_size * PASS_OVERHEAD[preprocessed],
    )
    # These classifiers learn from images that are not purified.
    unchanged = bool(job.prepared) or config.defense.get("name") in ("pixel-defend", "defense-gan")
    cost = _passes(job, FORWARD_AND_BACKWARD * passes, 0 if unchanged else passes)
    if config.precision != "float32":
        cost = replace(cost, operations=0.0, half_operations=cost.operations)
    return cost + overhead + _fitting(config.defense, config.dataset)


def _evaluation(job: Evaluate) -> Cost:
    examples, settings = _examples(job.model, job.examples), job.settings
    defended = bool(job.model.config.defense)
    # Per image, clean and adversarial: forward passes of the network, and estimates of the image.
    scoring = float(2 * job.draws)
    forward = scoring if defended else 2.0
    estimated = scoring
    if job.attack == "spsa":
        forward += settings["steps"] * settings["samples"]
        estimated += settings["steps"] * settings["samples"]
    elif job.attack == "boundary":
        forward += 2 * 10 * settings["steps"]
        estimated += 2 * 10 * settings["steps"]
    elif job.attack == "on-manifold":
        forward += FORWARD_AND_BACKWARD * 2 * settings["steps"] * settings["starts"]
        estimated += settings["starts"] * settings["eot"]
    else:
        gradients = settings.get("steps", 1) * settings.get("eot", 1) * settings.get("restarts", 1)
        if "budget" in settings:
            budget = settings["budget"]
            gradients = PASSES.get(budget, budget)
        if job.attack == "pgd-smallest":
            # It asks after every step whether the model is fooled.
            gradients *= settings.get("rounds", SmallestPGD.rounds)
            forward += gradients
        forward += FORWARD_AND_BACKWARD * gradients
        bypassed = job.surrogate is not None or job.gray or job.attack == "classifier-only"
        exact = job.gradient == "exact" or job.attack == "standard"
        estimated += 0 if bypassed else gradients * (3 if exact else 1)
    batches = -(-examples // job.batch_size)
    passes = batches * (settings.get("steps", 1) * settings.get("restarts", 1) + 3)
    overhead = Cost(
        disk=examples * (500 + 8 * 2 * job.draws),
        overhead_seconds=passes * PASS_OVERHEAD[defended and estimated > scoring],
    )
    return _passes(job.model, examples * forward, examples * estimated) + overhead


def _passes(model: Train, forward: float, estimated: float) -> Cost:
    config = model.config
    cost = Cost(operations=forward * _operations(model)[0])
    return cost + _estimation(config.defense, config.dataset, estimated) if config.defense else cost


def _memory(model: Train, weights: int, kept: int, estimated: int) -> float:
    """Bytes for so many sets of weights, activations of `kept` images, and estimates of `estimated` ones."""
    channels, side, *_ = _shape(model.config.dataset)
    _, parameters, activations = _operations(model)
    estimates = estimated * channels * side * side * ESTIMATION_COPIES if model.config.defense else 0
    return GPU_CONTEXT + 4 * (weights * parameters + kept * activations + estimates)


def _estimation(defense: dict[str, Any], dataset: str, count: float) -> Cost:
    channels, side, *_ = _shape(dataset)
    images = count * channels * side * side / 3072
    if defense.get("name") == "pixel-defend":
        # Every feature is computed once, but pixel after pixel: the calls are shared by a batch.
        operations, _, _, layers = _likelihood(defense, dataset)
        calls = count / MAX_BATCH * side * side * layers * CALLS_PER_LAYER
        waiting = calls * SECONDS_PER_CALL
        return Cost(count * operations, estimation_seconds=waiting, images_estimated=waiting / GPU_ESTIMATION)
    if defense.get("name") == "defense-gan":
        passes = FORWARD_AND_BACKWARD * defense.get("steps", 40) * defense.get("starts", 4)
        return Cost(count * passes * _gan(defense, dataset)[0])
    if defense.get("name") == "image-quilting":
        patch, overlap = defense.get("patch", 5), defense.get("overlap", 2)
        queries = len(places(side, patch, overlap)) ** 2
        return Cost(count * 2 * queries * defense.get("patches", 100_000) * channels * patch**2)
    seconds = CORE_ESTIMATION.get(defense.get("estimator", {}).get("name", ""), 1e-3)
    return Cost(estimation_seconds=images * seconds, images_estimated=images)


def _operations(model: Train) -> tuple[int, int, int]:
    channels, side, classes, *_ = _shape(model.config.dataset)
    levels = model.config.defense.get("levels", 1) if model.config.defense.get("name") == "thermometer" else 1
    return forward_operations(model.config.model, channels * levels, side, classes)


def _examples(model: Train, examples: int | None) -> int:
    testing = _shape(model.config.dataset)[4]
    return min(examples or testing, testing)


def _shape(dataset: str) -> tuple[int, int, int, int, int]:
    return SHAPES.get(dataset, SHAPES["tiny-imagenet"])
