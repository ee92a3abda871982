"""It learns: real digits, by the recipes a user runs, with fewer epochs; whole, both pass 95 %."""

from dataclasses import replace

import pytest

from menet.training import recipes, train
from menet.training.config import me_net
from menet.training.log import read_log


@pytest.mark.parametrize(
    ("defense", "epochs", "bar"),
    [({}, 2, 0.95), (me_net("nuclear-norm", (0.4, 0.6)), 2, 0.92)],
    ids=["plain", "me-net"],
)
def test_it_learns_the_embedded_digits(tmp_path, defense, epochs, bar):
    folder = train(replace(recipes.digits(), defense=defense, epochs=epochs), tmp_path / "run")
    last = read_log(folder)[-1]
    assert last["kind"] == "test"
    assert last["images"] == 1000
    assert last["accuracy"] > bar, last["accuracy"]
