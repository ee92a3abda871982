"""Ways of stepping against random models, at equal forward and backward passes.

Each line is one attack of the same number of gradients (steps × draws), judged as in `benchmarks.strength`:
robust accuracy over 20 fresh draws with a 95 % interval over the examples, and the difference to `pgd`, paired by
example.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.strength import Line, arguments, compare, subject
from menet.attacks import APGD, PGD, CrossEntropy, ThreatModel
from menet.attacks.ascent import MomentumStep, StepRule
from menet.attacks.base import Task

Schedule = Callable[[float], float]
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
SPLITS = (1, 2, 5, 10, 20)
"""Draws of each gradient, at the same number of gradients."""


@dataclass(frozen=True)
class Probability:
    """Minus the probability of the label."""

    def __call__(self, logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
        return -functional.softmax(logits, 1).gather(1, labels[:, None]).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class Variant(PGD):
    """PGD by `MomentumStep` with its parts exchanged."""

    momentum: float | None = None
    """That of `MomentumStep` if None."""
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
        published = MomentumStep(settings.threat, task.images, settings.steps or 1, settings.eot or 1)
        self.momentum = published.momentum if settings.momentum is None else settings.momentum

    def step(self, images: Tensor, gradient: Tensor, losses: Tensor) -> Tensor:
        settings = self.settings
        gradient = gradient / gradient.abs().mean((1, 2, 3), keepdim=True).clamp_min(1e-30)
        self.accumulated = self.momentum * self.accumulated + gradient
        size = settings.first * settings.threat.epsilon
        size *= SCHEDULES[settings.schedule](self.taken / (settings.steps or 1))
        self.taken += 1
        moved = images + size * settings.threat.direction(self.accumulated)
        return settings.threat.project(moved, self.origin)

    def select(self, last: Tensor) -> Tensor | None:
        return None if self.settings.keep_best else last


def attacks(threat: ThreatModel, steps: int, draws: int) -> Iterator[tuple[str, PGD]]:
    """The lines of the table, `pgd` with that many steps and draws first, the others with one part exchanged.

    All but those that name another loss take cross-entropy, by whose steps they were chosen.
    """
    settings: dict[str, Any] = {"threat": threat, "steps": steps, "eot": draws}
    common, constant = {**settings, "loss": CrossEntropy()}, 2.5 * threat.epsilon / steps
    yield "`pgd` on cross-entropy: momentum over 40 draws, cosine from ε/2, last iterate", PGD(**common)
    yield "… highest loss instead of the last iterate", Variant(**common, keep_best=True)
    yield "… no momentum", Variant(**common, momentum=0.0)
    yield "… momentum 0.75", Variant(**common, momentum=0.75)
    yield "… momentum 0.9", Variant(**common, momentum=0.9)
    yield "… linear schedule", Variant(**common, schedule="linear")
    yield "… constant schedule", Variant(**common, schedule="constant")
    yield "… from ε/4", Variant(**common, first=0.25)
    yield "… from ε", Variant(**common, first=1.0)
    yield "… margin loss, the default", PGD(**settings)
    yield "… probability loss", Variant(**settings, loss=Probability())
    for other in SPLITS:
        if other != draws:
            split = {**common, "steps": steps * draws // other, "eot": other}
            yield f"… {split['steps']} steps × {other} draw{'s' * (other > 1)}", PGD(**split)
    yield "constant steps of 2.5 ε/steps, highest loss", PGD(**common, step_size=constant, keep="best")
    yield "constant steps of 2.5 ε/steps, last iterate", PGD(**common, step_size=constant, keep="last")
    yield "APGD as published", APGD(**common, threshold=0.75, keep="best")


def main() -> None:
    """Attack each model in every way, and print a line for each."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--gradient", default="exact", choices=("exact", "bpda"))
    options = parser.parse_args([] if __name__ != "__main__" else None)
    settings = {name: getattr(options, name) for name in ("steps", "draws", "gradient")}
    for name in options.models:
        model = subject(name, options.defense)
        view = model.with_gradient(options.gradient)
        variants = attacks(ThreatModel("linf", options.epsilon), options.steps, options.draws)
        chosen: list[Line] = [(line, attack, view) for line, attack in variants]
        passes = f"{options.steps} steps × {options.draws} draws, {options.gradient} gradients"
        print(f"{name} {options.defense or ''}: {passes}, ε {options.epsilon:g}")
        compare(name, model, chosen, options, **settings)


if __name__ == "__main__":
    main()
