"""Ways of stepping against random models, at equal forward and backward passes.

Each line is one attack of the same number of gradients (steps × draws). Robust accuracy is the mean over 20 fresh
draws, with the standard error over examples. Give run folders of `menet train`; without any, an adversarially
trained ME-Net on the embedded digits is made first, in some minutes.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from menet import data
from menet.attacks import APGD, PGD, Margin, ThreatModel
from menet.attacks.ascent import MomentumStep, StepRule
from menet.attacks.base import Task
from menet.preprocessed import Preprocessed
from menet.training import load_model, recipes, train

Schedule = Callable[[float], float]
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True, kw_only=True)
class Variant(PGD):
    """PGD by `MomentumStep` with its parts exchanged."""

    momentum: float = MomentumStep.MOMENTUM
    first: float = 0.5
    """First step size, in units of epsilon."""
    schedule: str = "cosine"
    keep_best: bool = False

    def step_rule(self, task: Task) -> StepRule:
        return _Rule(self, task)


class _Rule(StepRule):
    def __init__(self, settings: Variant, task: Task) -> None:
        self.settings, self.origin = settings, task.images
        self.accumulated, self.taken = torch.zeros_like(task.images), 0

    def step(self, images: Tensor, gradient: Tensor, losses: Tensor) -> Tensor:
        settings = self.settings
        gradient = gradient / gradient.abs().mean((1, 2, 3), keepdim=True).clamp_min(1e-30)
        self.accumulated = settings.momentum * self.accumulated + gradient
        size = settings.first * settings.threat.epsilon
        size *= SCHEDULES[settings.schedule](self.taken / settings.steps)
        self.taken += 1
        moved = images + size * settings.threat.direction(self.accumulated)
        return settings.threat.project(moved, self.origin)

    def select(self, last: Tensor) -> Tensor | None:
        return None if self.settings.keep_best else last


def attacks(threat: ThreatModel, steps: int, draws: int) -> dict[str, PGD]:
    """The lines of the table, the default of `pgd` first."""
    common: dict[str, Any] = {"threat": threat, "steps": steps, "eot": draws}
    constant = 2.5 * threat.epsilon / steps
    return {
        "pgd (momentum .75, cosine from ε/2, last)": PGD(**common),
        "  highest loss instead of last": Variant(**common, keep_best=True),
        "  no momentum": Variant(**common, momentum=0.0),
        "  momentum .9": Variant(**common, momentum=0.9),
        "  linear schedule": Variant(**common, schedule="linear"),
        "  constant schedule": Variant(**common, schedule="constant"),
        "  from ε/4": Variant(**common, first=0.25),
        "  from ε": Variant(**common, first=1.0),
        "  margin loss": Variant(**common, loss=Margin()),
        "  half the draws, twice the steps": PGD(threat=threat, steps=2 * steps, eot=max(1, draws // 2)),
        "  twice the draws, half the steps": PGD(threat=threat, steps=steps // 2, eot=2 * draws),
        "constant steps of 2.5 ε / steps, highest loss": PGD(**common, step_size=constant, keep="best"),
        "constant steps of 2.5 ε / steps, last": PGD(**common, step_size=constant, keep="last"),
        "constant steps, one draw, as many gradients": PGD(
            threat=threat, steps=steps * draws, step_size=constant, eot=1, keep="last"
        ),
        "APGD as published": APGD(**common, threshold=0.75, keep="best"),
    }


def main() -> None:
    """Attack each run in every way, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="run folders; by default one on digits is made")
    parser.add_argument("--data", default="digits", help="dataset")
    parser.add_argument("--epsilon", type=float, default=0.3, help="budget ε, linf")
    parser.add_argument("--images", type=int, default=100, help="number of test images")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--gradient", default="exact", choices=("exact", "bpda"))
    options = parser.parse_args([] if __name__ != "__main__" else None)
    images, labels = data.load(options.data, "test").batch(slice(0, options.images))
    with tempfile.TemporaryDirectory() as folder:
        for run in options.runs or [trained(Path(folder))]:
            model = load_model(run)
            assert isinstance(model, Preprocessed)
            threat = ThreatModel("linf", options.epsilon)
            passes = f"{options.steps} steps × {options.draws} draws, {options.gradient} gradients"
            print(f"{run}: {passes}, ε {options.epsilon:g}")
            print(f"{'clean':<50} {accuracy(model, images, labels)}", flush=True)
            for name, attack in attacks(threat, options.steps, options.draws).items():
                view = model.with_gradient(options.gradient).reseed(1)
                found = attack(view, images, labels, generator=torch.Generator().manual_seed(0))
                print(f"{name:<50} {accuracy(model, found.images, labels)}", flush=True)


def trained(folder: Path) -> Path:
    """An adversarially trained ME-Net on digits."""
    recipe = replace(
        recipes.digits(), objective="adversarial", defense={"name": "me-net"}, model="small", epsilon=0.3
    )
    return train(recipe, folder / "run").folder


@torch.no_grad()
def accuracy(model: Preprocessed, images: Tensor, labels: Tensor, draws: int = 20) -> str:
    """Expected accuracy over fresh draws in percent, with its standard error over examples."""
    model.reseed(12345)
    right = torch.stack([(model(images).argmax(1) == labels).double() for _ in range(draws)]).mean(0)
    return f"{100 * right.mean():5.1f} ± {100 * right.std() / len(right) ** 0.5:.1f}"


if __name__ == "__main__":
    main()
