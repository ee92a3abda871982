"""Checkpoints that were damaged on disk, or made by someone who means harm."""

import random
import resource
import time
from pathlib import Path

import pytest
import torch
from training_helpers import plain, tiny

from menet.errors import CheckpointError
from menet.models import weights
from menet.training import load_model, train
from menet.training.checkpoint import BEST, LAST, load_verified, read_checkpoint, save_with_digest
from menet.training.config import me_net


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tiny(epochs=1), tmp_path_factory.mktemp("run") / "run").folder


@pytest.fixture(scope="module")
def lenet(tmp_path_factory) -> Path:
    config = plain(epochs=1, model="lenet", defense=me_net("usvt"))
    return train(config, tmp_path_factory.mktemp("lenet") / "run").folder


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


@pytest.mark.parametrize("name", [BEST, LAST])
def test_every_flipped_bit_of_a_tensor_is_found(run, tmp_path, name):
    content = (run / name).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(14)
    for _ in range(60):
        path = tmp_path / name
        path.write_bytes(flipped(content, chance.randrange(start, len(content)), chance.randrange(8)))
        with pytest.raises(CheckpointError, match="does not match its digest"):
            load_model(path)
        if name == LAST:
            with pytest.raises(CheckpointError, match="does not match its digest"):
                read_checkpoint(path, tiny(epochs=1))


def test_a_flipped_bit_of_the_header_changes_nothing_silently(run, tmp_path):
    """Refused, or loaded with the same weights and settings: a flip in the word `digest` itself harms nothing."""
    content = (run / BEST).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(15)
    original, refused = load_model(run / BEST), 0
    for _ in range(120):
        path = tmp_path / BEST
        path.write_bytes(flipped(content, chance.randrange(end), chance.randrange(8)))
        try:
            model = load_model(path)
        except CheckpointError:
            refused += 1
            continue
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
        assert model.settings() == original.settings()
    assert refused > 100


def test_training_does_not_resume_from_a_damaged_checkpoint(run, tmp_path):
    content = (run / LAST).read_bytes()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LAST).write_bytes(flipped(content, len(content) - 100, 3))
    with pytest.raises(CheckpointError, match="does not match its digest"):
        train(tiny(epochs=1), tmp_path / "run")


def test_training_does_not_resume_without_a_digest(run, tmp_path):
    tensors, header = load_verified(run / LAST)
    del header["digest"]
    weights.save(tmp_path / "run" / LAST, tensors, header)
    with pytest.raises(CheckpointError, match="no digest"):
        train(tiny(epochs=1), tmp_path / "run")


def test_weights_saved_by_hand_load_without_a_digest(run, tmp_path):
    tensors, header = load_verified(run / BEST)
    del header["digest"]
    weights.save(tmp_path / "own.safetensors", tensors, header)
    assert load_model(tmp_path / "own.safetensors").settings() == load_model(run).settings()


def test_damaged_progress_is_refused(run, tmp_path):
    tensors, header = load_verified(run / LAST)
    wrong = ({"epoch": -1}, {"step": "x"}, {"seen": 1.5}, {"loss": None}, {"best": "high"}, {"correct": True})
    progress = [{"progress": {**header["progress"], **one}} for one in wrong]
    for change in (
        {"progress": None},
        {"progress": {"epoch": 1}},
        {"training": 7},
        {"defense": {}},
        *progress,
    ):
        save_with_digest(tmp_path / "run" / LAST, tensors, {**header, **change})
        with pytest.raises(CheckpointError):
            train(tiny(epochs=1), tmp_path / "run")


BOMBS = [
    {"defense": {"masks": 10**12}},
    {"defense": {"masks": 10**7}},
    {"architecture": {"side": 490}},
    {"architecture": {"side": 60_000}},
    {"architecture": {"classes": 65_000}},
    {"architecture": {"channels": 60_000, "mean": [0.0] * 60_000, "std": [1.0] * 60_000}},
    {"architecture": {"name": "wide-resnet-34-10"}},
    {"defense": {"name": "pixel-defend", "channels": 64, "width": 1024, "layers": 64}},
    {"defense": {"name": "thermometer", "levels": 10**9}},
    {"defense": {"name": "thermometer", "levels": 1000}},
    {"defense": {"name": "discretize", "colors": 65_536, "channels": 65_536}},
    {"defense": {"p": [0.5] * 10**5}},
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: str(bomb)[:60])
def test_a_small_file_cannot_ask_for_much_memory(lenet, tmp_path, bomb):
    tensors, header = load_verified(lenet / BEST)
    for part, change in bomb.items():
        header[part] = change if "name" in change and part == "defense" else {**header[part], **change}
    path = tmp_path / "bomb.safetensors"
    save_with_digest(path, tensors, header)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError, match="cannot load"):
        load_model(path)
    # Loosely: other tests of this process have set the high-water mark too.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB
    assert time.process_time() - started < 20


def test_a_checkpoint_to_resume_from_cannot_either(lenet, tmp_path):
    config = plain(epochs=1, model="lenet", defense=me_net("usvt"))
    tensors, header = load_verified(lenet / LAST)
    for change in (
        {"defense": {**header["defense"], "masks": 10**12}},
        {"architecture": {**header["architecture"], "side": 490}},
        {"training": {**header["training"], "defense": {**header["defense"], "masks": 10**12}}},
    ):
        save_with_digest(tmp_path / "run" / LAST, tensors, {**header, **change})
        with pytest.raises(CheckpointError):
            train(config, tmp_path / "run")
