"""The standard suite against other evaluations of random defenses, at equal gradient passes on the same images.

Robust accuracy is the mean over 50 fresh draws, with the standard error over examples; passes are forward and
backward ones per example, as counted. Give run folders of `menet train` with a random defense.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from menet import data
from menet.attacks import PGD, Attack, AttackResult, Margin, Standard, Task, ThreatModel
from menet.attacks.external import NORMS, bridged
from menet.attacks.standard import gradient_views
from menet.errors import require
from menet.training import load_model

Line = tuple[str, Attack, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class PublishedRand(Attack):
    """AutoAttack's own `rand` version, which judges each example by a single draw."""

    title: ClassVar[str] = "AutoAttack rand, as published"

    threat: ThreatModel
    steps: int
    draws: int

    def run(self, task: Task) -> AttackResult:
        library = require("pyautoattack", extra="external")
        with bridged(task, self.title) as (bridge, seed):
            suite = library.AutoAttack(
                bridge,
                version="custom",
                attacks=["apgd-ce", "apgd-dlr"],
                eps=self.threat.epsilon,
                norm=NORMS[self.threat.norm],
                seed=seed,
                device=task.images.device,
            )
            suite.apgd.n_restarts, suite.apgd.eot_iter, suite.apgd.n_iter = 1, self.draws, self.steps
            found, _ = suite.run_standard_evaluation(task.images.float(), task.labels, batch_size=256)
        return task.result(self.threat.project(found, task.images))


def lines(model: Callable[[Tensor], Tensor], threat: ThreatModel, passes: int) -> Iterator[Line]:
    """Each evaluation with about `passes` gradient passes per example; the suite may spend fewer."""
    views = gradient_views(model)
    exact, bpda = next(iter(views.values())), list(views.values())[-1]
    paper_step = 0.01 if threat.epsilon > 0.1 else 2 / 255
    yield "menet standard", Standard(threat=threat, budget=passes), model
    yield "AutoAttack rand, as published", PublishedRand(threat=threat, steps=passes // 40, draws=20), exact
    plain = PGD(threat=threat, steps=passes, step_size=paper_step, eot=1, keep="last")
    yield f"the paper's BPDA-{passes}", plain, bpda
    for draws in (10, 20):
        steps = passes // draws
        eot = PGD(threat=threat, steps=steps, step_size=2.5 * threat.epsilon / steps, eot=draws, keep="last")
        yield f"BPDA + EOT, {steps} steps × {draws} draws", eot, bpda
    many = max(1, passes // 20)
    few = PGD(threat=threat, steps=20, step_size=threat.epsilon / 4, eot=many, loss=Margin(), keep="last")
    yield f"margin, 20 steps × {many} draws", few, exact
    for draws in (1, 5, 20):
        steps = passes // draws
        for name, size in (("2.5 ε/steps", 2.5 * threat.epsilon / steps), ("ε/8", threat.epsilon / 8)):
            constant = PGD(threat=threat, steps=steps, step_size=size, eot=draws, keep="last")
            yield f"exact, {steps} steps × {draws} draws, {name}", constant, exact


def main() -> None:
    """Evaluate each run in every way, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--data", default="mnist", help="dataset")
    parser.add_argument("--epsilon", type=float, default=0.3, help="budget ε, linf")
    parser.add_argument("--images", type=int, default=200, help="number of test images")
    parser.add_argument("--passes", type=int, default=600, help="gradient passes per example")
    parser.add_argument("--only", default="", help="only the lines that contain this text")
    options = parser.parse_args()
    images, labels = data.load(options.data, "test").batch(slice(0, options.images))
    for run in options.runs:
        model = load_model(run).eval()
        print(f"{run}: {options.images} images, {options.passes} gradient passes, ε {options.epsilon:g}")
        print(f"{'clean':<45} {accuracy(model, images, labels)}", flush=True)
        for name, attack, view in lines(model, ThreatModel("linf", options.epsilon), options.passes):
            if options.only not in name:
                continue
            model.reseed(1)
            began = time.perf_counter()
            generator = torch.Generator().manual_seed(0)
            parts = [
                attack(view, images[start : start + 100], labels[start : start + 100], generator=generator)
                for start in range(0, len(images), 100)
            ]
            found = torch.cat([part.images for part in parts])
            forward, backward = (
                torch.cat([getattr(part, kind) for part in parts]).double().mean()
                for kind in ("queries", "gradients")
            )
            print(
                f"{name:<45} {accuracy(model, found, labels)}   "
                f"{forward:5.0f} + {backward:5.0f} passes  {time.perf_counter() - began:5.0f} s",
                flush=True,
            )
            members = [member for part in parts for member in part.members or ()]
            for member in dict.fromkeys(members):
                print(f"    {members.count(member):4d}  {member}", flush=True)


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor, draws: int = 50) -> str:
    """Expected accuracy over fresh draws in percent, with its standard error over examples."""
    model.reseed(12345)  # type: ignore[operator]
    right = torch.stack([(model(images).argmax(1) == labels).double() for _ in range(draws)]).mean(0)
    return f"{100 * right.mean():5.1f} ± {100 * right.std() / len(right) ** 0.5:.1f}"


if __name__ == "__main__":
    main()
