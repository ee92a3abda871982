"""Packed weights and the networks of the package: small, equal but for rounding, and safe to read."""

import json

import pytest
import torch

import menet
from menet.commands.models import measured
from menet.errors import CheckpointError, ConfigurationError
from menet.models import build, weights
from menet.training import load_model, pretrained
from menet.training.checkpoint import save_with_digest

SMALL_SIDE = 8


def saved(path):
    """A file of weights of a ME-Net on small images."""
    inner = build("lenet", channels=1, classes=3, side=SMALL_SIDE, generator=torch.Generator().manual_seed(0))
    model = menet.MENet(inner, "usvt", p=0.5)
    header = {
        "architecture": weights.describe(inner),
        "defense": menet.preprocessed.describe(model),
        "dataset": "mnist",
        "training": {"objective": "standard", "epochs": 1, "seed": 0},
    }
    save_with_digest(path, model.state_dict(), header)
    return model


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A package with one network."""
    folder = tmp_path / "pretrained"
    folder.mkdir()
    monkeypatch.setattr(pretrained, "FOLDER", folder)
    saved(tmp_path / "whole.safetensors")
    pretrained.pack(tmp_path / "whole.safetensors", folder / "mnist-tiny.safetensors", rank=1024)
    return folder


def test_packing_keeps_the_matrix_of_best_approximation(tmp_path):
    model = saved(tmp_path / "whole.safetensors")
    size = pretrained.pack(tmp_path / "whole.safetensors", tmp_path / "small.safetensors", rank=16)
    assert size < (tmp_path / "whole.safetensors").stat().st_size / 4
    before, after = model.state_dict(), load_model(tmp_path / "small.safetensors").state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        if name.endswith("hidden.weight"):
            left, scales, right = torch.linalg.svd(value.double(), full_matrices=False)
            best = (left[:, :16] * scales[:16]) @ right[:16]
            torch.testing.assert_close(after[name].double(), best, rtol=0, atol=2e-3 * float(best.abs().max()))
        else:
            torch.testing.assert_close(after[name], value, rtol=1e-3, atol=1e-6)


def test_large_convolutions_are_packed_in_eight_bits(tmp_path):
    network = build("compact", channels=3, side=32, classes=10, generator=torch.Generator().manual_seed(0))
    state = network.state_dict()
    packed = weights.pack(state, rank=64)
    assert sum(value.nbytes for value in packed.values()) < 0.3 * sum(value.nbytes for value in state.values())
    unpacked = weights.unpack(packed, state)
    assert weights.difference(state, unpacked) is None
    levels = [name for name in state if name + weights.LEVELS in packed]
    assert levels
    for name in levels:
        # Rounding to the nearest of 127 steps on each side, per output channel.
        largest = state[name].abs().amax((1, 2, 3), keepdim=True)
        assert ((unpacked[name] - state[name]).abs() <= 0.501 * largest / 127).all()


def test_eight_bits_of_another_shape_or_kind_are_refused(without_annotation_checks):
    kernel = torch.zeros(256, 64, 3, 3)
    packed = weights.pack({"w": kernel}, rank=1)
    assert torch.equal(weights.unpack(packed, {"w": kernel})["w"], kernel)
    for name, wrong in (("w.levels", torch.zeros(2, 2, 2, 2, dtype=torch.int8)), ("w.scale", torch.zeros(3))):
        with pytest.raises(CheckpointError, match="expected 'w' as 8-bit integers of shape 256×64×3×3"):
            weights.unpack({**packed, name: wrong}, {"w": kernel})
    with pytest.raises(CheckpointError, match="not finite"):
        weights.pack({"w": kernel + torch.nan}, rank=1)


def test_weights_that_were_never_packed_stay_as_they_are():
    state = {"a": torch.randn(3, 4), "n": torch.tensor(3)}
    unpacked = weights.unpack(state, state)
    assert all(unpacked[name] is state[name] for name in state)


def test_factors_with_a_huge_product_are_refused(tmp_path):
    """Two factors of kilobytes whose product would take terabytes."""
    expected = {"w": torch.empty(4, 4, device="meta")}
    bomb = {"w.left": torch.zeros(2**20, 1).half(), "w.right": torch.zeros(1, 2**20).half()}
    with pytest.raises(CheckpointError, match="expected factors"):
        weights.unpack(bomb, expected)


def test_a_defense_in_front_of_a_network_that_was_trained_without(tmp_path):
    inner = build("lenet", channels=1, classes=3, side=SMALL_SIDE, generator=torch.Generator().manual_seed(0))
    save_with_digest(tmp_path / "bare.safetensors", inner.state_dict(), {"architecture": weights.describe(inner)})
    pretrained.pack(
        tmp_path / "bare.safetensors", tmp_path / "b.safetensors", 1024, {"name": "bit-depth", "bits": 1}
    )
    model = menet.load(tmp_path / "b.safetensors")
    images = torch.rand(2, 1, SMALL_SIDE, SMALL_SIDE)
    torch.testing.assert_close(model(images), inner.eval()(images.round()), rtol=1e-2, atol=1e-3)
    with pytest.raises(ConfigurationError, match="without a defense, got one behind bit-depth"):
        pretrained.pack(tmp_path / "b.safetensors", tmp_path / "c.safetensors", 1024, {"name": "jpeg"})


def test_a_defense_that_learns_is_fitted_to_the_training_images(tmp_path):
    inner = build("lenet", channels=1, classes=10, side=28, generator=torch.Generator().manual_seed(0))
    header = {"architecture": weights.describe(inner)}
    quilting = {"name": "image-quilting", "patches": 300, "patch": 4}
    save_with_digest(tmp_path / "nameless.safetensors", inner.state_dict(), header)
    with pytest.raises(
        ConfigurationError, match="expected a network that says its dataset, to fit image-quilting"
    ):
        pretrained.pack(tmp_path / "nameless.safetensors", tmp_path / "b.safetensors", 64, quilting)
    save_with_digest(tmp_path / "bare.safetensors", inner.state_dict(), header | {"dataset": "digits"})
    pretrained.pack(tmp_path / "bare.safetensors", tmp_path / "b.safetensors", 64, quilting)
    model = menet.load(tmp_path / "b.safetensors")
    assert bool(model.fitted)
    images = menet.data.load("digits", "train").images[:]
    windows = images.unfold(2, 4, 1).unfold(3, 4, 1).flatten(4).flatten(0, 3)
    assert set(map(tuple, model.bank.flatten(1)[:20].tolist())) <= set(map(tuple, windows.unique(dim=0).tolist()))
    gan = {"name": "defense-gan", "latent": 3, "features": 1, "gan_steps": 1, "steps": 2, "starts": 2}
    pretrained.pack(tmp_path / "bare.safetensors", tmp_path / "g.safetensors", 64, gan)
    assert menet.load(tmp_path / "g.safetensors").settings()["height"] == 28
    assert not list(tmp_path.glob("*.pt"))


def test_weights_beyond_half_precision_are_refused():
    with pytest.raises(CheckpointError, match="half precision"):
        weights.pack({"w": torch.tensor([1e6])}, rank=1)


def test_a_flipped_bit_is_noticed(shelf):
    path = shelf / "mnist-tiny.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        menet.load("mnist-tiny")


def test_a_name_loads_and_a_path_of_that_name_comes_first(shelf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(menet.load("mnist-tiny"), menet.MENet)
    (tmp_path / "runs" / "mnist-tiny").mkdir(parents=True)
    assert pretrained.locate("mnist-tiny").parent.name == "runs"
    assert pretrained.dataset_of(shelf / "mnist-tiny.safetensors") == "mnist"


def test_an_unknown_name_lists_the_known(shelf):
    with pytest.raises(ConfigurationError, match="mnist-tiny"):
        pretrained.card("mnist-small")


def test_the_card_on_the_command_line(shelf, capsys):
    from menet.cli import main

    line = {
        "threat": "linf, ε 0.3", "clean": {"value": 0.9, "low": 0.8, "high": 0.95}, "attack": "standard",
        "robust": {"value": 0.1, "low": 0.05, "high": 0.2}, "examples": 1000, "draws": 20,
    }  # fmt: skip
    (shelf / pretrained.MEASURED).write_text(json.dumps({"mnist-tiny": [line]}))
    assert main(["models", "show", "mnist-tiny"]) == 0
    text = capsys.readouterr().out
    assert "robust 10.0 (5.0–20.0) %" in text
    assert "license" in text
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["networks"][0]["measured"] == [line]
    assert main(["models", "show", "nothing"]) == 2


def test_the_cards_say_what_the_results_say():
    """`measured.json` is what `menet models measured` would write now."""
    results = pretrained.FOLDER.parent.parent / "results"
    if not results.is_dir():
        pytest.skip("needs the results of the repository")
    found = json.loads((pretrained.FOLDER / pretrained.MEASURED).read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(measured(results)))
    assert set(found) == set(pretrained.names())
