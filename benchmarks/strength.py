"""The standard suite against other evaluations of random defenses, at equal gradient passes on the same images.

Robust accuracy is the mean over 20 fresh draws, the same for every line, with a 95 % interval over the examples;
beside it the difference to the suite, paired by example. Passes are forward and backward ones per example, as
counted. Models are run folders, or networks of `menet models list`, with a defense put in front if one is given.
With `--rows`, each line is kept with its examples, and a line that is there is not measured again. `--fill FILE`
measures nothing, but writes the tables of these rows into a Markdown file, between its markers.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import menet
from menet import data
from menet.attacks import PGD, Attack, AttackResult, Margin, Standard, Task, ThreatModel
from menet.attacks.external import NORMS, bridged
from menet.attacks.standard import gradient_views
from menet.errors import require
from menet.preprocessed import Preprocessed, evaluation_mode, in_bfloat16, rebuild
from menet.report.narrative import budget

Line = tuple[str, Attack, Callable[[Tensor], Tensor]]
SUITE = f"menet standard, version {Standard().version}"
LEADING = "`pgd`"
"""The attack that others are compared with in `benchmarks.stepping` and `benchmarks.sparse`; here the suite."""
GRID_DRAWS, GRID_SIZES = (1, 5, 10), (4, 8, 16)
"""Draws and step sizes (ε over these) of Gao et al. 2022, at ε = 8/255 their 2, 1 and 0.5 of 255."""
BATCH = 100
SCORING_DRAWS = 20


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
    yield SUITE, Standard(threat=threat, budget=passes), model
    many = max(1, passes // 20)
    few = PGD(threat=threat, steps=20, step_size=threat.epsilon / 4, eot=many, loss=Margin(), keep="last")
    yield f"margin, 20 steps × {many} draws", few, exact
    sizes = {f"ε/{divisor}": threat.epsilon / divisor for divisor in GRID_SIZES}
    grid = [(draws, name, size) for draws in GRID_DRAWS for name, size in sizes.items()]
    grid += [(draws, "2.5 ε/steps", 2.5 * threat.epsilon * draws / passes) for draws in (5, 20)]
    for draws, name, size in grid:
        constant = PGD(threat=threat, steps=passes // draws, step_size=size, eot=draws, keep="last")
        yield f"exact, {passes // draws} steps × {draws} draw{'s' * (draws > 1)} of {name}", constant, exact
    yield "AutoAttack rand, as published", PublishedRand(threat=threat, steps=passes // 40, draws=20), exact
    plain = PGD(threat=threat, steps=passes, step_size=paper_step, eot=1, keep="last")
    yield f"the paper's BPDA-{passes}", plain, bpda
    steps = passes // 10
    eot = PGD(threat=threat, steps=steps, step_size=2.5 * threat.epsilon / steps, eot=10, keep="last")
    yield f"BPDA + EOT, {steps} steps × 10 draws", eot, bpda


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that benchmarks of attacks have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("models", nargs="*", default=["mnist-menet-adversarial"], help="run folders or names")
    parser.add_argument("--defense", help="a defense to put in front, as JSON with its name and settings")
    parser.add_argument("--data", default="mnist", help="dataset")
    parser.add_argument(
        "--epsilon", type=lambda text: float(Fraction(text)), default=0.3, help="budget ε, linf, such as 8/255"
    )
    parser.add_argument("--images", type=int, default=200, help="number of test images")
    parser.add_argument("--only", nargs="*", default=[""], help="only the lines that contain one of these texts")
    parser.add_argument("--bfloat16", action="store_true", help="attack in bfloat16; scored in float32")
    parser.add_argument("--rows", type=Path, help="file of JSON lines to keep the examples in")
    return parser


def main() -> None:
    """Evaluate each model in every way, and print a line for each."""
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, default=400, help="gradient passes per example")
    parser.add_argument("--fill", nargs="*", type=Path, help="write the rows' tables into these files, only")
    options = parser.parse_args([] if __name__ != "__main__" else None)
    if options.fill:
        for file in options.fill:
            file.write_text(filled(file.read_text(), read(options.rows)))
        return
    threat = ThreatModel("linf", options.epsilon)
    for name in options.models:
        model = subject(name, options.defense)
        print(f"{name} {options.defense or ''}: {options.images} images, {options.passes} gradient passes")
        compare(name, model, list(lines(model, threat, options.passes)), options, passes=options.passes)


def subject(name: str, defense: str | None = None) -> Preprocessed:
    """The model of that name in evaluation mode, behind `defense` if one is given."""
    model = menet.load(name).eval()
    model = rebuild(model, json.loads(defense)).eval() if defense else model
    if not isinstance(model, Preprocessed):
        raise SystemExit(f"expected a model with a preprocessing, got {name} without; give --defense")
    return model


def compare(
    name: str, model: Preprocessed, chosen: Sequence[Line], options: argparse.Namespace, **settings: Any
) -> list[dict[str, Any]]:
    """Run each attack on the same images and print its line, with the difference to the first of them."""
    images, labels = data.load(options.data, "test").batch(slice(0, options.images))
    key = {"model": name, "defense": options.defense, "data": options.data, "epsilon": options.epsilon}
    key |= {"images": len(images), "bfloat16": options.bfloat16, **settings}
    there = {row["attack"]: row for row in read(options.rows) if {part: row.get(part) for part in key} == key}
    print(f"{'clean':<50} {interval(expected(model, images, labels))}", flush=True)
    rows: list[dict[str, Any]] = []
    for line, attack, view in chosen:
        if not any(text in line for text in options.only):
            continue
        row = there.get(line)
        if row is None:
            row = {**key, "attack": line, **attacked(attack, view, model, images, labels, options.bfloat16)}
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        rows.append(row)
        print(described(row, rows[0]), flush=True)
        for member, count in row["members"].items():
            print(f"    {count:4d}  {member}", flush=True)
    return rows


def attacked(
    attack: Attack,
    view: Callable[[Tensor], Tensor],
    model: Preprocessed,
    images: Tensor,
    labels: Tensor,
    fast: bool = False,
) -> dict[str, Any]:
    """What an attack found through `view`, and what it took."""
    model.reseed(1)
    began, generator = time.process_time(), torch.Generator().manual_seed(0)
    with evaluation_mode(model), in_bfloat16(model) if fast else nullcontext():
        parts = [
            attack(view, images[start : start + BATCH], labels[start : start + BATCH], generator=generator)
            for start in range(0, len(images), BATCH)
        ]
    seconds = time.process_time() - began
    counts = [torch.cat([getattr(part, kind) for part in parts]) for kind in ("queries", "gradients")]
    forward, backward = (float(count.double().mean()) for count in counts)
    members = [member for part in parts for member in part.members or ()]
    right = expected(model, torch.cat([part.images for part in parts]), labels)
    return {
        "correct": [round(float(one), 4) for one in right],
        "forward": round(forward),
        "backward": round(backward),
        "seconds": round(seconds),
        "members": {member: members.count(member) for member in dict.fromkeys(members)},
    }


@torch.no_grad()
def expected(model: Preprocessed, images: Tensor, labels: Tensor, draws: int = SCORING_DRAWS) -> Tensor:
    """Of each example, the fraction of fresh draws that classify it correctly."""
    model.reseed(12345)
    return torch.stack([(model(images).argmax(1) == labels).double() for _ in range(draws)]).mean(0)


def interval(right: Tensor | Sequence[float], sign: str = "") -> str:
    """A mean in percent with half of its 95 % interval over examples."""
    values = 100 * np.asarray(right)
    return f"{values.mean():{sign}5.1f} ± {1.96 * values.std(ddof=1) / len(values) ** 0.5:.1f}"


def difference(row: dict[str, Any], reference: dict[str, Any]) -> str:
    """How much higher accuracy is than in `reference`, paired by example."""
    return interval(np.subtract(row["correct"], reference["correct"]), "+")  # type: ignore[arg-type]


def described(row: dict[str, Any], reference: dict[str, Any]) -> str:
    """One line of the output."""
    cost = f"{row['forward']:5d} + {row['backward']:5d} passes  {row['seconds']:4d} s"
    beside = difference(row, reference) if row is not reference else ""
    return f"{row['attack']:<50} {interval(row['correct'])}   {beside:<14} {cost}"


def read(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no file."""
    if path is None or not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def filled(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """A document with the tables of `rows` between markers, such as <!-- strength --> and <!-- /strength -->."""
    for name, part in (("strength", "passes"), ("stepping", "steps"), ("sparse", "sparse")):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(begin)
        if found:
            tables = "".join(markdown(row for row in rows if part in row))
            text = f"{before}{begin}\n{tables}{end}{rest.partition(end)[2]}"
    return text


def markdown(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A table for each number of gradients, attacks by models: accuracy, then differences to the first attack."""
    tables: dict[tuple[int, int], dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        before = f"{json.loads(row['defense'])['name']} + " if row["defense"] else ""
        size = f"{row['epsilon']} pixels" if "sparse" in row else f"ε {budget(row['epsilon'])}"
        column = f"{before}{row['model']}, {size}"
        key = (row.get("passes") or row.get("sparse") or row["steps"] * row["draws"], row["images"])
        tables.setdefault(key, {}).setdefault(column, {})[row["attack"]] = row
    for (gradients, images), columns in sorted(tables.items()):
        yield f"\n**{gradients:,} gradients, {images} images**\n\n"
        yield f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        attacks = dict.fromkeys(attack for found in columns.values() for attack in found)
        # The strongest come first, by the mean over the models that both were measured on.
        for attack in sorted(attacks, key=lambda name: (name != leading_of(attacks), _behind(columns, name))):
            yield f"| {attack} | {' | '.join(_cell(found, attack) for found in columns.values())} |\n"
    yield "\n"


def leading_of(attacks: Iterable[str]) -> str:
    """The attack that others are compared with: `pgd` where it is one of them, else the suite."""
    return next((name for name in attacks if name.startswith(LEADING)), SUITE)


def _behind(columns: dict[str, dict[str, dict[str, Any]]], attack: str) -> float:
    """By how much an attack leaves more than the one that leads, on average over the models."""
    pairs = [(found.get(attack), found.get(leading_of(found))) for found in columns.values()]
    both = [np.mean(row["correct"]) - np.mean(lead["correct"]) for row, lead in pairs if row and lead]
    return float(np.mean(both)) if both else float("inf")


def _cell(found: dict[str, dict[str, Any]], attack: str) -> str:
    leading = found.get(leading_of(found))
    if attack not in found or leading is None:
        return ""
    row = found[attack]
    return interval(row["correct"]).strip() if row is leading else difference(row, leading).strip()


if __name__ == "__main__":
    main()
