"""Each baseline takes part in training, and a run's folder brings it back."""

import pytest
import torch

from menet import data
from menet.preprocessed import describe
from menet.training import TrainingConfig, load_model, train

SETTINGS = {
    "thermometer": {"levels": 4},
    "total-variation": {},
    "pixel-defend": {"levels": 4, "width": 2, "layers": 0, "steps": 2},
    "bit-depth": {"bits": 1},
    "median": {},
    "resize-pad": {},
    "discretise": {"colours": 2},
    "jpeg": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trained_baseline_comes_back_from_its_run(name, tmp_path):
    config = TrainingConfig(
        model="small", defense={"name": name, **SETTINGS[name]}, epochs=1, batch=16, limit=32, precision="float32"
    )
    train(config, tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert describe(model)["name"] == name
    images, _ = data.load("digits", "test").batch(slice(0, 2))
    logits = model.reseed(0)(images[..., ::2, ::2] if name == "pixel-defend" else images)
    assert logits.shape == (2, 10)
    assert bool(torch.isfinite(logits).all())
