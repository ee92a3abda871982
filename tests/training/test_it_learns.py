"""Trainings to the end: what a recipe reaches on real images."""

from dataclasses import replace
from pathlib import Path

import pytest

from menet import data
from menet.training import TrainingConfig, load_model, recipes, train
from menet.training.batches import Batches
from menet.training.checkpoint import LAST, load_verified, model_tensors, save_with_digest
from menet.training.config import me_net
from menet.training.log import read_log
from menet.training.objectives import training_attack
from menet.training.validation import accuracy

pytestmark = pytest.mark.slow


def reached(folder: Path) -> float:
    (row,) = [row for row in read_log(folder) if row["kind"] == "test"]
    return row["accuracy"]


@pytest.mark.parametrize("defense", [{}, me_net("nuclear-norm", (0.4, 0.6))], ids=["vanilla", "me-net"])
def test_digits(defense: dict, tmp_path: Path) -> None:
    train(replace(recipes.by_name("digits"), defense=defense), tmp_path)
    assert reached(tmp_path) > 0.95


@pytest.mark.timeout(1200)
def test_me_net_on_mnist(real_data: Path, tmp_path: Path) -> None:
    defense = me_net("nuclear-norm", (0.4, 0.6))
    config = replace(recipes.by_name("mnist"), defense=defense, epochs=2, limit=20_000)
    train(config, tmp_path, root=real_data)
    # All 60,000 images reach 98.4 %.
    assert reached(tmp_path) > 0.96


def test_a_run_that_overfits_catastrophically_falls_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Robust by N-FGSM, then trained by FGSM without noise at a larger budget: it learns to defeat FGSM alone."""
    robust = TrainingConfig(
        model="small", objective="n-fgsm", noise=1.0, epsilon=0.25, steps=7, step_size=0.1, limit=300,
        batch_size=50, epochs=15, learning_rate=0.2, schedule="step", validation=60, guard=15, ema=0.5,
        precision="float32",
    )  # fmt: skip
    train(robust, tmp_path)
    overfitting = replace(robust, noise=0.0, epsilon=0.4, epochs=20)
    tensors, header = load_verified(tmp_path / LAST)
    save_with_digest(tmp_path / LAST, tensors, {**header, "training": overfitting.as_dict()})
    train(overfitting, tmp_path)
    checks = [row for row in read_log(tmp_path) if row["kind"] == "guard"]
    highest = max(row["pgd"] for row in checks if row["step"] <= 90)
    assert highest > 0.2
    caught = [row for row in checks if row["fell_back"]]
    assert caught
    assert all(row["pgd"] < 0.5 * highest and row["fgsm"] > 2 * row["pgd"] for row in caught)
    assert "fell back to the last good weights" in capsys.readouterr().err
    tensors, _ = load_verified(tmp_path / LAST)
    model = load_model(tmp_path / LAST)
    model.load_state_dict(model_tensors(tensors, "good"))
    held_out = Batches.of(robust).held_out
    kept = accuracy(model, data.load("digits", "train"), held_out, attack=training_attack(robust))
    assert kept > max(0.2, 2 * max(row["pgd"] for row in caught))
