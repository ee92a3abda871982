"""Trainings to the end: what a recipe reaches on real images."""

from dataclasses import replace
from pathlib import Path

import pytest

from menet.training import TrainingConfig, recipes, train
from menet.training.config import me_net
from menet.training.log import read_log
from menet.training.validation import Check

pytestmark = pytest.mark.slow


def reached(folder: Path) -> float:
    (row,) = [row for row in read_log(folder) if row["kind"] == "test"]
    return row["accuracy"]


def test_me_net_on_digits(tmp_path: Path) -> None:
    defense = me_net("nuclear-norm", (0.4, 0.6))
    train(replace(recipes.by_name("digits"), defense=defense, epochs=3), tmp_path)
    # The eight epochs of the recipe reach 95 % in bfloat16.
    assert reached(tmp_path) > 0.9


def test_me_net_on_mnist(real_data: Path, tmp_path: Path) -> None:
    defense = me_net("nuclear-norm", (0.4, 0.6))
    config = replace(recipes.by_name("mnist"), defense=defense, epochs=2, limit=5_000)
    train(config, tmp_path, root=real_data)
    # Four epochs of all 60,000 images reach 98.4 %.
    assert reached(tmp_path) > 0.85


def test_a_run_that_overfits_catastrophically_falls_back(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks are planted: whether a run of seconds overfits by itself depends on the processor's rounding."""
    planted = iter([Check(0.5, 0.6, 0.1), Check(0.6, 0.7, 0.1), Check(0.02, 0.9, 0.1), Check(0.6, 0.7, 0.1)])
    monkeypatch.setattr("menet.training.loop.check", lambda *_, **__: next(planted))
    config = TrainingConfig(
        model="small", objective="n-fgsm", epsilon=0.1, limit=150, batch_size=50, epochs=4, learning_rate=0.05,
        validation=60, guard=3, ema=0.5, precision="float32",
    )  # fmt: skip
    train(config, tmp_path)
    checks = [row for row in read_log(tmp_path) if row["kind"] == "guard"]
    assert [row["fell_back"] for row in checks] == [False, False, True, False]
    assert "fell back to the last good weights" in capsys.readouterr().err
