"""Scales: from a job at the size of the paper to a smaller one of the same kind."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from menet.errors import ConfigurationError
from menet.experiments.jobs import Certify, Evaluate, Job, Prepare, Train
from menet.experiments.measures import Cost, Ranks, Reconstructions, Vectors
from menet.training import TrainingConfig, recipes


@dataclass(frozen=True)
class Scale:
    """A function from a paper-scale job to one of this scale; what it needs was scaled before."""

    name: str
    summary: str
    dataset: Callable[[str], str]
    training: Callable[[TrainingConfig], TrainingConfig]
    images: int | None
    """Images of a prepared set, of rank histograms and of features; all if None."""
    examples: int | None
    """Test images attacked; all if None."""
    masks: int
    """Fresh masks that each is scored on."""
    batch: int
    steps: Callable[[int], int]
    """Of iterative attacks; it must not shrink two numbers of the paper to one order reversed."""
    eot: int
    restarts: Callable[[int], int]
    samples: int
    """Of SPSA, behind each gradient."""
    walk: int
    """Steps of the Boundary attack."""
    certificate: int
    """Masks behind each certificate."""

    def __call__(self, job: Job) -> Job:
        if isinstance(job, Prepare):
            return replace(job, dataset=self.dataset(job.dataset), limit=self.images)
        if isinstance(job, Train):
            return replace(job, config=self._training(job))
        if isinstance(job, Evaluate):
            return self._evaluate(job)
        if isinstance(job, Certify):
            settings = replace(
                job.settings,
                stop=self.examples,
                selection=max(10, self.certificate // 10),
                estimation=self.certificate,
            )
            return replace(job, settings=settings)
        if isinstance(job, Ranks):
            return replace(job, dataset=self.dataset(job.dataset), limit=self.images)
        if isinstance(job, Reconstructions):
            return replace(job, dataset=self.dataset(job.dataset))
        if isinstance(job, Cost):
            return replace(job, dataset=self.dataset(job.dataset), batch=min(job.batch, self.images or job.batch))
        if isinstance(job, Vectors):
            return job
        raise ConfigurationError(f"there is no scale for a job of the kind {job.kind!r}")

    def _training(self, job: Train) -> TrainingConfig:
        config = self.training(replace(job.config, dataset=self.dataset(job.config.dataset)))
        # A prepared set is cut when it is made; the run then takes all of it.
        return replace(config, limit=None) if job.prepared is not None else config

    def _evaluate(self, job: Evaluate) -> Evaluate:
        settings: dict[str, Any] = dict(job.settings)
        if job.attack == "boundary":
            settings["steps"] = min(settings["steps"], self.walk)
        elif (steps := settings.get("steps", 1)) > 1:
            settings["steps"] = self.steps(steps)
            if "step_size" in settings and settings["steps"] < steps:
                # Fewer steps must still be able to cross the ball.
                settings["step_size"] = max(settings["step_size"], 2.5 * settings["epsilon"] / settings["steps"])
        if "restarts" in settings:
            settings["restarts"] = self.restarts(settings["restarts"])
        for name, most in (("eot", self.eot), ("samples", self.samples)):
            if name in settings:
                settings[name] = min(settings[name], most)
        examples = min(self.examples or math.inf, job.examples or math.inf)
        return replace(
            job,
            settings=settings,
            examples=None if examples == math.inf else int(examples),
            masks=min(job.masks, self.masks),
            batch=self.batch,
            pictures=int(min(job.pictures, examples)),
        )


def _smoke_training(config: TrainingConfig) -> TrainingConfig:
    defense = config.defense
    if defense.get("name") == "pixel-defend":
        defense = {**defense, "channels": 1, "levels": 16, "width": 8, "layers": 2, "steps": 20}
    return replace(
        config, recipe="smoke", model="small", defense=defense, epochs=2, batch=20, limit=300, rate=0.1,
        schedule="one-cycle", milestones=(), augmentation=False, steps=2,
        step_size=max(config.step_size, config.epsilon), precision="float32",
    )  # fmt: skip


def _laptop_training(config: TrainingConfig) -> TrainingConfig:
    short = recipes.by_name(config.dataset, "short")
    return replace(
        short, defense=config.defense, objective=config.objective, seed=config.seed, validation=0,
        limit=None if config.dataset == "tiny-imagenet" else 10_000, precision="auto",
    )  # fmt: skip


SMOKE = Scale(
    name="smoke",
    summary="300 embedded digits for every dataset, a small network, two epochs, 24 examples: shows that it runs",
    dataset=lambda _: "digits",
    training=_smoke_training,
    images=300,
    examples=24,
    masks=8,
    batch=24,
    steps=lambda steps: max(2, round(math.log2(steps) / 1.25)),
    eot=2,
    restarts=lambda restarts: {10: 2, 20: 3, 50: 4}.get(restarts, 2),
    samples=16,
    walk=10,
    certificate=50,
)
LAPTOP = Scale(
    name="laptop",
    summary="10,000 images of each dataset, small networks, short recipes, 200 examples: hours on a few cores",
    dataset=lambda name: name,
    training=_laptop_training,
    images=10_000,
    examples=200,
    masks=20,
    batch=50,
    steps=lambda steps: {100: 60, 200: 60, 1000: 100}.get(steps, steps),
    eot=10,
    restarts=lambda restarts: {10: 3, 20: 5, 50: 8}.get(restarts, restarts),
    samples=128,
    walk=200,
    certificate=500,
)
PAPER = Scale(
    name="paper",
    summary="the paper's data, networks, recipes and attacks, whole test sets: for GPUs",
    dataset=lambda name: name,
    training=lambda config: config,
    images=None,
    examples=None,
    masks=100,
    batch=100,
    steps=lambda steps: steps,
    eot=40,
    restarts=lambda restarts: restarts,
    samples=2048,
    walk=1000,
    certificate=10_000,
)
SCALES = {scale.name: scale for scale in (SMOKE, LAPTOP, PAPER)}


def by_name(name: str) -> Scale:
    """The scale of that name."""
    if name not in SCALES:
        raise ConfigurationError(f"scale is {name!r}; accepted are {', '.join(SCALES)}")
    return SCALES[name]
