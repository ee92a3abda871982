"""Trainings to the end: what a recipe reaches on real images."""

from dataclasses import replace
from pathlib import Path

import pytest

from menet.training import recipes, train
from menet.training.config import me_net
from menet.training.log import read_log

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
