"""Robust accuracy of preprocessing defenses on the embedded digits, for the ranking in the paper's table.

Every defense is trained in the same way, without adversarial training, and attacked by PGD (40 steps) with BPDA,
and with exact gradients where they are not zero; random defenses also with EOT over 10 draws. Accuracy is on
fresh draws: the mean over seeds of training and attack, with the lowest and the highest in parentheses. There are
few images: this gives a ranking, not a result.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from menet import data
from menet.attacks import PGD, ThreatModel
from menet.commands.demo import BASELINES
from menet.preprocessed import Preprocessed
from menet.training import load_model, recipes, train

EPSILON = 0.3
DEFENSES: dict[str, dict] = {
    "none": {},
    "me-net": {"name": "me-net"},
    **{name: {"name": name, **other.settings} for name, other in BASELINES.items()},
}
DEFENSES["pixel-defend"]["epsilon"] = EPSILON
WITH_GRADIENT = ("me-net", "total-variation", "median", "resize-pad")
ATTACKS = {"bpda": ("bpda", 1), "exact": ("exact", 1), "bpda, 10": ("bpda", 10), "exact, 10": ("exact", 10)}
RANDOM = ("me-net", *(name for name, other in BASELINES.items() if other.random))


def main() -> None:
    """Train and attack each defense, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(DEFENSES), help="defenses; all by default")
    parser.add_argument("--images", type=int, default=200, help="number of test images")
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="budget ε of the attack, linf")
    parser.add_argument("--epochs", type=int, default=8, help="training epochs")
    parser.add_argument("--model", default="lenet", help="architecture")
    parser.add_argument("--seeds", type=int, default=1, help="number of independent trainings")
    options = parser.parse_args()
    recipe = replace(recipes.digits(), epochs=options.epochs, model=options.model)
    testing = data.load("digits", "test")
    order = torch.randperm(len(testing), generator=torch.Generator().manual_seed(0))[: options.images]
    images, labels = testing.batch(order)
    print(
        f"accuracy (%) on {len(images)} digits, linf ε = {options.epsilon:g}, 40 steps, {options.seeds} seed(s)"
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
        print(f"{name:<16} " + " ".join(f"{summarize(rows[column]):>14}" for column in columns), flush=True)


def summarize(scores: list[float]) -> str:
    return f"{sum(scores) / len(scores):.1f} ({min(scores):.0f}–{max(scores):.0f})" if scores else ""


@torch.no_grad()
def accuracy(model, images, labels) -> float:
    """Accuracy in percent, averaged over 5 fresh draws."""
    right = [(model(images).argmax(1) == labels).float().mean() for _ in range(5)]
    return 100 * float(torch.stack(right).mean())


if __name__ == "__main__":
    main()
