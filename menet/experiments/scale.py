"""Scales: functions from a job at the paper's scale to a smaller one of the same kind."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from menet.attacks.losses import MAX_BATCH
from menet.errors import ConfigurationError
from menet.experiments.jobs import Certify, Evaluate, Job, Prepare, Train
from menet.experiments.measures import (
    EstimationError,
    FeatureVectors,
    Ranks,
    Reconstructions,
    Redistributed,
    Timing,
)
from menet.models import NETWORKS
from menet.training import TrainingConfig, recipes
from menet.training.config import Objective


@dataclass(frozen=True)
class Scale:
    """A function from a paper-scale job, whose needs are scaled already, to one of this scale."""

    name: str
    summary: str
    dataset: Callable[[str], str]
    training: Callable[[TrainingConfig], TrainingConfig]
    images: int | None
    """Images of a prepared set and of rank histograms; all if None."""
    examples: int | None
    """Test images to attack; all if None."""
    draws: int
    """Fresh draws that each image is scored on."""
    batch_size: int
    """Images attacked together."""
    steps: Callable[[int], int]
    """Steps of iterative attacks; strictly increasing on the paper's numbers of steps."""
    eot: int
    """Draws per gradient of EOT."""
    restarts: Callable[[int], int]
    """Restarts; strictly increasing on the paper's numbers."""
    spsa_samples: int
    """Samples per gradient of SPSA."""
    boundary_steps: int
    suite: str | int
    """Budget of the standard suite."""
    certificate_draws: int
    """Draws that bound the vote of a certificate; a tenth as many select the class."""
    query_examples: int | None = None
    """Test images for SPSA and Boundary, which take thousands of queries each; as many as `examples` if None."""
    prepared: bool = True
    """Whether a ME-Net without adversarial training learns from a prepared set, or draws masks as it goes."""
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass of an attack or its scoring."""

    def sized(self, examples: int | None = None, max_batch: int | None = None) -> "Scale":
        """The scale with as many test images and at most so many in a forward pass, as its summary then says."""
        changed = self
        for name, value in (("examples", examples), ("max_batch", max_batch)):
            if value is not None and value < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {value}")
        if examples is not None:
            queries = min(examples, self.query_examples or examples)
            summary = f"{self.summary}; here {examples:,} examples"
            changed = replace(changed, examples=examples, query_examples=queries, summary=summary)
        return changed if max_batch is None else replace(changed, max_batch=max_batch)

    def measures(self, job: Job) -> bool:
        """Whether the networks of a paper-scale job are those of this scale, or stand for no other row.

        At a scale without Wide-ResNets their rows would repeat those of the network that replaces them.
        """
        if isinstance(job, Train) and job.config.model in WIDE_NETWORKS:
            return self._training(job).model == job.config.model
        return all(map(self.measures, job.needs))

    def __call__(self, job: Job) -> Job:
        if isinstance(job, Prepare):
            return replace(job, dataset=self.dataset(job.dataset), limit=self.images)
        if isinstance(job, Train):
            return self._train(job)
        if isinstance(job, Evaluate):
            return self._evaluate(job)
        if isinstance(job, Certify):
            settings = replace(
                job.settings,
                stop=self.examples,
                selection=max(10, self.certificate_draws // 10),
                estimation=self.certificate_draws,
            )
            return replace(job, settings=settings)
        if isinstance(job, Ranks):
            return replace(job, dataset=self.dataset(job.dataset), limit=self.images)
        if isinstance(job, Reconstructions):
            return replace(job, dataset=self.dataset(job.dataset))
        if isinstance(job, EstimationError):
            return replace(job, dataset=self.dataset(job.dataset), examples=self.examples)
        if isinstance(job, Timing):
            size = min(job.batch_size, self.images or job.batch_size)
            return replace(job, dataset=self.dataset(job.dataset), batch_size=size)
        if isinstance(job, FeatureVectors | Redistributed):
            return job
        raise ConfigurationError(f"expected a job that can be scaled, got one of kind {job.kind!r}")

    def _train(self, job: Train) -> Train:
        config = self._training(job)
        if self.prepared or job.prepared is None:
            return replace(job, config=config)
        defense = config.defense
        if job.config.defense["masks"] != USUAL_MASKS:
            # Where their number is the question, masks are fixed as in a prepared set.
            defense = {**defense, "bank": job.prepared.seed}
        return replace(job, config=replace(config, defense=defense, every_copy=False), prepared=None)

    def _training(self, job: Train) -> TrainingConfig:
        config = self.training(replace(job.config, dataset=self.dataset(job.config.dataset)))
        # The limit applies when the set is prepared; training then uses all of it.
        return replace(config, limit=None) if job.prepared is not None else config

    def _evaluate(self, job: Evaluate) -> Evaluate:
        settings: dict[str, Any] = dict(job.settings)
        if job.attack == "boundary":
            settings["steps"] = min(settings["steps"], self.boundary_steps)
        elif (steps := settings.get("steps", 1)) > 1:
            settings["steps"] = self.steps(steps)
            if "step_size" in settings and settings["steps"] < steps:
                # Fewer steps must still be able to cross the ε-ball.
                settings["step_size"] = max(settings["step_size"], 2.5 * settings["epsilon"] / settings["steps"])
        if "budget" in settings:
            settings["budget"] = self.suite
        if "restarts" in settings:
            settings["restarts"] = self.restarts(settings["restarts"])
        for name, limit in (("eot", self.eot), ("samples", self.spsa_samples)):
            if name in settings:
                settings[name] = min(settings[name], limit)
        examples = min(self.examples or math.inf, job.examples or math.inf)
        if job.attack in ("spsa", "boundary"):
            examples = min(examples, self.query_examples or math.inf)
        return replace(
            job,
            settings=settings,
            examples=None if examples == math.inf else int(examples),
            draws=min(job.draws, self.draws),
            batch_size=self.batch_size,
            max_batch=self.max_batch,
            snapshots=int(min(job.snapshots, examples)),
        )


WIDE_NETWORKS = tuple(name for name in NETWORKS if name.startswith("wide-resnet"))
USUAL_MASKS = 10
"""Masks per image in the paper's training, but where their number is varied."""


PUBLISHED_SIZES = {
    "pixel-defend": ("likelihood", "width", "layers", "mixtures", "steps"),
    "image-quilting": ("patches",),
    "defense-gan": ("steps", "starts", "method", "latent", "features", "gan_steps"),
}
"""Settings of baselines that only the scale of the paper has; at others they have their defaults."""
SMOKE_SIZES: dict[str, dict[str, Any]] = {
    "pixel-defend": {"channels": 1, "levels": 16, "width": 8, "layers": 2, "steps": 20},
    "image-quilting": {"patches": 1000},
    "defense-gan": {"latent": 8, "features": 2, "gan_steps": 10, "steps": 5, "starts": 2},
}


def _with_small_baseline(config: TrainingConfig) -> TrainingConfig:
    """The defense without what its publication has and few machines can afford; `Train.described` says so."""
    published = PUBLISHED_SIZES.get(config.defense.get("name", ""), ())
    return replace(config, defense={k: v for k, v in config.defense.items() if k not in published})


def _smoke_training(config: TrainingConfig) -> TrainingConfig:
    if config.recipe == "certificate":
        return replace(config, epochs=2, batch_size=20, limit=300, precision="float32")
    defense = _with_small_baseline(config).defense
    defense = defense | SMOKE_SIZES.get(defense.get("name", ""), {})
    return replace(
        config, recipe="smoke", model="small", defense=defense, epochs=2, batch_size=20, limit=300,
        learning_rate=0.1, schedule="one-cycle", milestones=(), augmentation=False, every_copy=False, steps=2,
        step_size=max(config.step_size, config.epsilon), precision="float32",
    )  # fmt: skip


def _laptop_training(config: TrainingConfig) -> TrainingConfig:
    if config.recipe == "certificate":
        return config  # minutes of one core
    config = _with_small_baseline(config)
    short = recipes.by_name(config.dataset, "short")
    return replace(
        short, defense=config.defense, objective=config.objective, eot=config.eot, seed=config.seed, validation=0,
        limit=None if config.dataset == "tiny-imagenet" else 10_000, precision="auto",
    )  # fmt: skip


def _gpu_day_training(config: TrainingConfig) -> TrainingConfig:
    if config.recipe == "certificate":
        return config  # minutes of one core
    config = _with_small_baseline(config)
    if config.model in WIDE_NETWORKS:
        config = replace(config, model="resnet18")
    # The paper's epochs, but one estimate of an image in each, and layers in bfloat16 where a GPU has it.
    return replace(config, recipe="gpu-day", every_copy=False, precision="auto")


def _cores_training(config: TrainingConfig) -> TrainingConfig:
    if config.recipe == "certificate":
        return config  # minutes of one core
    config = _with_small_baseline(config)
    # ε 0.3 on MNIST is too much for one step: N-FGSM overfits to it. The paper's LeNet affords PGD.
    robust: Objective = "adversarial" if config.dataset == "mnist" else "n-fgsm"
    objective: Objective = robust if config.objective == "adversarial" else config.objective
    made = recipes.cores(config.dataset, objective, config.defense, config.eot)
    return replace(made, seed=config.seed)


SMOKE = Scale(
    name="smoke",
    summary="300 embedded digits for every dataset, a small network, two epochs, 24 examples: a smoke test",
    dataset=lambda _: "digits",
    training=_smoke_training,
    images=300,
    examples=24,
    draws=8,
    batch_size=24,
    steps=lambda steps: max(2, round(math.log2(steps) / 1.25)),
    eot=2,
    restarts=lambda restarts: {10: 2, 20: 3, 50: 4}.get(restarts, 2),
    spsa_samples=16,
    boundary_steps=10,
    suite=10,
    certificate_draws=50,
)
LAPTOP = Scale(
    name="laptop",
    summary="10,000 images of each dataset, small networks, short recipes, 200 examples: hours on a few cores",
    dataset=lambda name: name,
    training=_laptop_training,
    images=10_000,
    examples=200,
    draws=20,
    batch_size=50,
    steps=lambda steps: {100: 60, 200: 60, 1000: 100}.get(steps, steps),
    eot=10,
    restarts=lambda restarts: {10: 3, 20: 5, 50: 8}.get(restarts, restarts),
    spsa_samples=128,
    boundary_steps=200,
    suite="quick",
    certificate_draws=500,
)
CORES = Scale(
    name="cores",
    summary=(
        "whole training sets; MNIST with the paper's network, other datasets with the compact one; recipes of "
        "hours on two cores (adversarial training by PGD on MNIST, by N-FGSM elsewhere); 1,000 examples, 100 for "
        "SPSA and Boundary"
    ),
    dataset=lambda name: name,
    training=_cores_training,
    images=10_000,
    examples=1000,
    draws=20,
    batch_size=100,
    steps=lambda steps: {1000: 200}.get(steps, min(steps, 100)),
    eot=10,
    restarts=lambda restarts: {10: 3, 20: 5, 50: 8}.get(restarts, restarts),
    spsa_samples=128,
    boundary_steps=1000,
    suite="quick",
    certificate_draws=1000,
    query_examples=100,
    prepared=False,
)
GPU_DAY = Scale(
    name="gpu-day",
    summary=(
        "the paper's data, attacks and recipes with ResNet-18 and LeNet, but one of its estimates of an image "
        "per epoch; 1,000 examples, 100 for SPSA and Boundary, 20 draws: a day or two on one GPU"
    ),
    dataset=lambda name: name,
    training=_gpu_day_training,
    images=None,
    examples=1000,
    draws=20,
    batch_size=250,
    steps=lambda steps: steps,
    eot=10,
    restarts=lambda restarts: {10: 3, 20: 5, 50: 10}.get(restarts, restarts),
    spsa_samples=2048,
    boundary_steps=1000,
    suite="standard",
    certificate_draws=10_000,
    query_examples=100,
)
PAPER = Scale(
    name="paper",
    summary="the paper's data, networks, recipes and attacks on whole test sets: for GPUs",
    dataset=lambda name: name,
    training=lambda config: config,
    images=None,
    examples=None,
    draws=100,
    batch_size=100,
    steps=lambda steps: steps,
    eot=40,
    restarts=lambda restarts: restarts,
    spsa_samples=2048,
    boundary_steps=1000,
    suite="standard",
    certificate_draws=10_000,
)
SCALES = {scale.name: scale for scale in (SMOKE, LAPTOP, CORES, GPU_DAY, PAPER)}


def by_name(name: str) -> Scale:
    """The scale of that name."""
    if name not in SCALES:
        raise ConfigurationError(f"unknown scale {name!r}; choose from {', '.join(SCALES)}")
    return SCALES[name]
