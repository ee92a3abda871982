"""Pure preprocessing under attack on the embedded digits: the order of the paper's table, measured here.

Every defense is trained alike, without attacks, and attacked by PGD (40 steps) through BPDA, and with exact
gradients where they are not zero; random ones also in expectation over 10 draws. Accuracy is on fresh draws: the
mean over seeds of training and attack, with the lowest and the highest in brackets. Few images: an order to look
at, not a result.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from menet import data
from menet.attacks import PGD, ThreatModel
from menet.commands.demo_plan import BESIDE
from menet.preprocessed import Preprocessed
from menet.training import load_model, recipes, train

EPSILON = 0.3
DEFENSES: dict[str, dict] = {
    "none": {},
    "me-net": {"name": "me-net"},
    **{name: {"name": name, **other.settings} for name, other in BESIDE.items()},
}
DEFENSES["pixel-defend"]["epsilon"] = EPSILON
WITH_GRADIENT = ("me-net", "total-variation", "median", "resize-pad")
ATTACKS = {"bpda": ("bpda", 1), "exact": ("exact", 1), "bpda, 10": ("bpda", 10), "exact, 10": ("exact", 10)}
RANDOM = ("me-net", *(name for name, other in BESIDE.items() if other.random))


def main() -> None:
    """Train, attack and print a line for each defense."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(DEFENSES), help="defenses; all if none is named")
    parser.add_argument("--images", type=int, default=200, help="test images to attack")
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="size of the attack")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of training")
    parser.add_argument("--model", default="lenet", help="network")
    parser.add_argument("--seeds", type=int, default=1, help="how many independent trainings")
    options = parser.parse_args()
    recipe = replace(recipes.digits(), epochs=options.epochs, model=options.model)
    testing = data.load("digits", "test")
    order = torch.randperm(len(testing), generator=torch.Generator().manual_seed(0))[: options.images]
    images, labels = testing.batch(order)
    print(
        f"percent right of {len(images)} digits, linf ε = {options.epsilon:g}, 40 steps, {options.seeds} seed(s)"
    )
    columns = ("clean", *ATTACKS)
    print(f"{'defense':<16} " + " ".join(f"{column:>14}" for column in columns))
    for name in options.names:
        rows: dict[str, list[float]] = {column: [] for column in columns}
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                train(replace(recipe, defense=DEFENSES[name], seed=seed), Path(folder) / "run")
                model = load_model(Path(folder) / "run")
            rows["clean"].append(accuracy(model, images, labels))
            for column, (gradient, eot) in ATTACKS.items():
                if (gradient == "exact" and name not in WITH_GRADIENT) or (eot > 1 and name not in RANDOM):
                    continue
                view = model.with_gradient(gradient) if isinstance(model, Preprocessed) else model
                attack = PGD(threat=ThreatModel(norm="linf", epsilon=options.epsilon), steps=40, eot=eot)
                attacked = attack(view, images, labels, generator=torch.Generator().manual_seed(1 + seed))
                rows[column].append(accuracy(model, attacked.images, labels))
        print(f"{name:<16} " + " ".join(f"{told(rows[column]):>14}" for column in columns), flush=True)


def told(scores: list[float]) -> str:
    return f"{sum(scores) / len(scores):.1f} ({min(scores):.0f}–{max(scores):.0f})" if scores else ""


@torch.no_grad()
def accuracy(model, images, labels) -> float:
    """Percent right, in the mean over 5 fresh draws."""
    right = [(model(images).argmax(1) == labels).float().mean() for _ in range(5)]
    return 100 * float(torch.stack(right).mean())


if __name__ == "__main__":
    main()
