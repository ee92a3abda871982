"""Each baseline takes part in training, and is loaded from the folder of its run."""

import json

import pytest
import torch

from menet import data
from menet.cli import main
from menet.evaluation.records import read_folder
from menet.evaluation.snapshots import unpack
from menet.preprocessed import Preprocessed, describe
from menet.training import TrainingConfig, load_model, train
from menet.training.checkpoint import LAST
from menet.training.loop import Saving
from menet.training.monitoring import Log

SETTINGS = {
    "thermometer": {"levels": 4},
    "total-variation": {},
    "pixel-defend": {"levels": 4, "width": 2, "layers": 0, "steps": 2},
    "image-quilting": {"patches": 200},
    "defense-gan": {"latent": 4, "features": 1, "gan_steps": 2, "steps": 2, "starts": 2},
    "bit-depth": {"bits": 1},
    "median": {},
    "resize-pad": {},
    "discretize": {"colors": 2},
    "jpeg": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trained_baseline_is_loaded_from_its_run(name, tmp_path):
    config = TrainingConfig(
        model="small",
        defense={"name": name, **SETTINGS[name]},
        epochs=1,
        batch_size=16,
        limit=32,
        precision="float32",
    )
    train(config, tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert describe(model)["name"] == name
    images, _ = data.load("digits", "test").batch(slice(0, 2))
    logits = model.reseed(0)(images[..., ::2, ::2] if name == "pixel-defend" else images)
    assert logits.shape == (2, 10)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("name", ["pixel-defend", "discretize", "image-quilting", "defense-gan"])
def test_a_resumed_run_does_not_fit_again(name, tmp_path, monkeypatch):
    config = TrainingConfig(
        model="small",
        defense={"name": name, **SETTINGS[name]},
        epochs=2,
        batch_size=16,
        limit=32,
        precision="float32",
    )
    kind, saving = Preprocessed.kinds[name], Saving(steps=1, log_steps=1)
    original, write, fits = kind.fit, Log.write, []

    def fit(self, images, generator):
        fits.append(len(images))
        return original(self, images, generator)

    def stop_at_the_third_step(self, kind, step, **values):
        write(self, kind, step, **values)
        if kind == "step" and step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, "fit", fit)
    train(config, tmp_path / "whole", saving=saving)
    monkeypatch.setattr(Log, "write", stop_at_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", saving=saving)
    monkeypatch.setattr(Log, "write", write)
    # Only from the images it is trained on, and only at the beginning.
    assert fits == [32, 32]
    train(config, tmp_path / "cut", saving=saving)
    assert fits == [32, 32]
    assert (tmp_path / "cut" / LAST).read_bytes() == (tmp_path / "whole" / LAST).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_trained_baseline_is_evaluated_and_audited(name, tmp_path, capsys):
    run = str(tmp_path / "run")
    settings = json.dumps(SETTINGS[name])
    small = ["--model", "small", "--epochs", "1", "--limit", "32", "--batch-size", "16"]
    assert main(["train", "digits", "--defense", name, "--settings", settings, "--out", run, *small]) == 0
    few = ["--stop", "4", "--draws", "2", "--snapshots", "2", "--attacks", "pgd:steps=2"]
    assert main(["evaluate", run, *few]) == 0
    (records,) = read_folder(tmp_path / "run" / "evaluation").values()
    assert len(records.rows) == 4
    for kept in (row["snapshots"] for row in records.rows if "snapshots" in row):
        assert unpack(kept["adversarial_seen"]["image"]).shape == (1, 28, 28)
    few = ["--quick", "--examples", "4", "--steps", "2", "--eot", "2", "--draws", "2"]
    # An untrained network may fail a check; what counts is that every check could be made.
    assert main(["audit", run, *few]) in (0, 1)
    findings = json.loads((tmp_path / "run" / "audit.json").read_text())["findings"]
    assert {"epsilon", "steps", "exact and BPDA", "black box"} <= {finding["name"] for finding in findings}
