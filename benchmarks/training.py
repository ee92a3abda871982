"""The fraction of an adversarial training step that the defense costs, measured side by side in one run.

ResNet-18 on 32×32 color images, PGD of 7 steps, fresh masks at each: the whole step, and in it the time spent
between an image and its estimate. Bars: nuclear norm ≤ 10 % (aim 5 %), USVT ≤ 2 %.
"""

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from menet import models
from menet.distributed import Worker
from menet.preprocessed import Preprocessed, rebuild
from menet.training.building import build_optimizer, number_type
from menet.training.config import TrainingConfig, me_net
from menet.training.loop import Step
from menet.training.objectives import build_objective
from menet.training.recipes import paper_cifar10

BARS = {"nuclear-norm": 0.10, "usvt": 0.02}
P = {"nuclear-norm": (0.4, 0.6), "usvt": (0.8, 1.0)}


def main(repeats: int = 3, batch: int = 32, model: str = "resnet18", steps: int = 7) -> None:
    """Print each estimator's fraction of the step beside its bar."""
    images, labels = _photographs(batch)
    print(f"training: {model}, adversarial step of PGD-{steps}, batches of {batch}")
    works = {name: _Watched(_config(name, model, steps, batch), images, labels) for name in BARS}
    bare = _Watched(_config(None, model, steps, batch), images, labels)
    # In turn, so that whatever else the machine does falls on all of them alike.
    for turn in range(repeats + 1):
        for work in (bare, *works.values()):
            work.step(keep=turn > 0)
    for name, work in works.items():
        fraction = median(inside / whole for inside, whole in zip(work.inside, work.whole, strict=True))
        missed = "" if fraction <= BARS[name] else "  MISSED"
        print(f"  {name + ', fraction of the step':<40} {fraction:6.1%} (bar {BARS[name]:.0%}){missed}")
        print(f"  {name + ', step / undefended step':<40} {median(work.whole) / median(bare.whole):5.2f} ×")


def _config(estimator: str | None, model: str, steps: int, batch: int) -> TrainingConfig:
    defense = {} if estimator is None else me_net(estimator, P[estimator])
    recipe = replace(
        paper_cifar10(), objective="adversarial", precision="auto", model=model, steps=steps, batch_size=batch
    )
    return replace(recipe, defense=defense)


class _Watched:
    """A training step with a clock around the defense's own work."""

    def __init__(self, config: TrainingConfig, images: Tensor, labels: Tensor) -> None:
        network = models.build(config.model, generator=torch.Generator().manual_seed(0))
        network = network.to(memory_format=torch.channels_last)
        self.model: nn.Module = rebuild(network, config.defense).train()
        if isinstance(self.model, Preprocessed):
            self._watch(self.model)
        kind = number_type(config.precision, images.device)
        self.module = Step(self.model, build_objective(config, Worker()), torch.Generator(), kind)
        self.optimizer = build_optimizer(config, self.model)
        self.images, self.labels = images, labels
        self.inside: list[float] = []
        self.whole: list[float] = []
        self._spent = 0.0

    def _watch(self, model: Preprocessed) -> None:
        original = model.preprocess

        def watched(*arguments: Any, **options: Any) -> Tensor:
            started = time.perf_counter()
            estimates = original(*arguments, **options)
            self._spent += time.perf_counter() - started
            return estimates

        model.preprocess = watched  # type: ignore[method-assign]

    def step(self, *, keep: bool) -> None:
        self._spent, started = 0.0, time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = self.module(self.images, self.labels)
        loss.backward()
        self.optimizer.step()
        if keep:
            self.whole.append(time.perf_counter() - started)
            self.inside.append(self._spent)


def _photographs(count: int) -> tuple[Tensor, Tensor]:
    # Real images: on noise the estimators would need more iterations than they ever do.
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.tensor(picture).permute(2, 0, 1) for picture in load_sample_images().images]
    crops = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        top = int(torch.randint(picture.shape[1] - 64, (), generator=generator))
        left = int(torch.randint(picture.shape[2] - 64, (), generator=generator))
        crops.append(picture[:, top : top + 64 : 2, left : left + 64 : 2])
    images = torch.stack(crops).float().div(255).to(memory_format=torch.channels_last)
    return images, torch.randint(10, (count,), generator=generator)


if __name__ == "__main__":
    main()
