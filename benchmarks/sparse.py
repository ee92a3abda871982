"""Attacks on a few pixels (l0) of random models, against σ-zero (Cinà et al. 2025), at equal gradient passes.

σ-zero minimizes the number of pixels, so that one run answers for every budget: an example counts with its clean
image where σ-zero took more pixels than the budget. It is adv-lib's, which nothing here depends on, since that
needs torchvision; `pip install --no-deps adv-lib` is enough. Without it only our attacks are measured. Judged as
in `benchmarks.strength`, on the mean over 20 fresh draws.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.strength import SUITE, Line, arguments, compare, subject
from menet.attacks import PGD, Attack, AttackResult, Margin, RandomSearch, Standard, Task, ThreatModel

BUDGETS = (4, 8, 16, 32)
"""Pixels."""


def sigma_zero() -> Callable[..., Tensor] | None:
    """adv-lib's function, without the rest of its package, which imports torchvision; None if it is not there."""
    found = find_spec("adv_lib")
    if found is None or found.submodule_search_locations is None:
        return None
    for name in ("adv_lib", "adv_lib.attacks", "adv_lib.utils"):
        spec = ModuleSpec(name, None, is_package=True)
        parts = name.split(".")[1:]
        spec.submodule_search_locations = ["/".join([found.submodule_search_locations[0], *parts])]
        sys.modules[name] = module_from_spec(spec)
    attack: Callable[..., Tensor] = importlib.import_module("adv_lib.attacks.sigma_zero").sigma_zero
    return attack


@dataclass(frozen=True, kw_only=True)
class SigmaZero(Attack):
    """σ-zero on the mean logits over `eot` draws; the clean image where it took more pixels than allowed."""

    title: ClassVar[str] = "σ-zero"

    threat: ThreatModel
    steps: int
    eot: int

    def run(self, task: Task) -> AttackResult:
        attack = sigma_zero()
        assert attack is not None

        def mean(images: Tensor) -> Tensor:
            draws = task.model(images.repeat(self.eot, 1, 1, 1), slice(None), self.eot)
            return draws.unflatten(0, (self.eot, len(images))).mean(0)

        found = attack(mean, task.images, task.labels, num_steps=self.steps)
        pixels = (found != task.images).any(1).flatten(1).sum(1)
        few = (pixels <= self.threat.epsilon).view(-1, 1, 1, 1)
        return task.result(torch.where(few, found, task.images))


def lines(model: Any, pixels: int, passes: int) -> Iterator[Line]:
    """Each attack with about `passes` gradient passes per example; random search has forward passes only."""
    threat, exact = ThreatModel("l0", pixels), model.with_gradient("exact")
    yield "`pgd`, two draws a step", PGD(threat=threat, steps=passes // 2, eot=2), exact
    for draws in (1, 10):
        yield f"… {_split(passes, draws)}", PGD(threat=threat, steps=passes // draws, eot=draws), exact
    yield "… margin loss", PGD(threat=threat, steps=passes // 2, eot=2, loss=Margin()), exact
    yield (
        "random search, scores of ten draws",
        RandomSearch(threat=threat, proposals=passes // 10, draws=10),
        model,
    )
    yield SUITE, Standard(threat=threat, budget=passes), model
    if sigma_zero() is not None:
        for draws in (1, 4, 10):
            attack = SigmaZero(threat=threat, steps=passes // draws, eot=draws)
            yield f"σ-zero, {_split(passes, draws)}", attack, exact


def _split(passes: int, draws: int) -> str:
    return f"{passes // draws} steps × {draws} draw{'s' * (draws > 1)}"


def main() -> None:
    """Attack each model within each budget."""
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, default=400, help="gradient passes per example")
    parser.add_argument("--budgets", nargs="*", type=int, default=BUDGETS, help="numbers of pixels")
    options = parser.parse_args([] if __name__ != "__main__" else None)
    for name in options.models:
        model = subject(name, options.defense)
        for pixels in options.budgets:
            print(f"{name} {options.defense or ''}: {pixels} pixels, {options.passes} gradient passes")
            options.epsilon = pixels
            compare(name, model, list(lines(model, pixels, options.passes)), options, sparse=options.passes)


if __name__ == "__main__":
    main()
