"""The prepared set S′: what is in it, that it can be resumed, shared out and trusted."""

import json
import shutil

import numpy as np
import pytest
import torch
from training_helpers import digest, tiny

from menet import NuclearNorm, images
from menet.cli import main
from menet.data import load
from menet.errors import ConfigurationError, DataError, MenetError
from menet.training import load_model, train
from menet.training import prepared as preparing
from menet.training.config import TrainingConfig, me_net
from menet.training.monitoring import read_log
from menet.training.prepared import (
    DESCRIPTION,
    Description,
    damage,
    open_prepared,
    prepare,
    read_description,
    shard_path,
)

DEFENSE = me_net("nuclear-norm", (0.4, 0.6), masks=4)
FULL = TrainingConfig(defense=DEFENSE).defense


def make(folder, **changes):
    return prepare("digits", DEFENSE, folder, **{"limit": 100, "per_shard": 32, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared") / "set"
    make(path)
    return path


def test_a_sample_that_misses_classes_says_so(tmp_path, capsys):
    arguments = ["prepare", "digits", "--masks", "1", "--limit", "3", "--out", str(tmp_path / "few")]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "the 3 training images of digits hold 3 of its 10 classes (none of " in told.err
    assert "in 1 shard: " in told.out
    train_few = ["train", "digits", "--limit", "4", "--batch-size", "4", "--epochs", "1"]
    assert main([*train_few, "--out", str(tmp_path / "run")]) == 0
    assert "the 4 training images of digits hold 4 of its 10 classes (none of " in capsys.readouterr().err


def contents(folder):
    return {path.name: digest(path) for path in sorted(folder.iterdir())}


def test_rows_are_estimates_of_their_images_under_the_schedule(folder):
    source = load("digits", "train")
    sample = source.sample(100)
    opened = open_prepared(folder, source, FULL)
    assert len(opened) == 100
    assert opened.copies == 4
    assert len(opened.dataset) == 400
    pixels, labels = opened.dataset.batch(slice(0, 400))
    assert torch.equal(labels, sample.labels.repeat_interleave(4))
    original = sample.batch(slice(0, 100))[0].repeat_interleave(4, 0)
    error = (pixels - original).square().mean((1, 2, 3)).sqrt()
    by_copy = error.view(100, 4).mean(0)
    # The probabilities rise from copy to copy, so the estimates get better; all are far from a blank image.
    assert by_copy.tolist() == sorted(by_copy.tolist(), reverse=True)
    assert float(error.max()) < float(original.square().mean().sqrt()) * 1.2
    # The first row exactly, by hand.
    from menet.masks import bernoulli
    from menet.seeding import Stream, stream

    first = original[:128]
    p = torch.tensor([0.4, 0.45, 0.5, 0.55]).repeat(32)
    mask = bernoulli((128, 28, 28), p, stream(0, Stream.PREPARE, 0))
    expected = images.to_image(NuclearNorm()(images.to_matrix(first), mask), first.shape)
    torch.testing.assert_close(pixels[:128], expected, rtol=0, atol=0.51 / 255 + 1e-3)


def test_memory_is_mapped_not_read(folder):
    rows = np.load(shard_path(folder, 0), mmap_mode="r")
    assert isinstance(rows, np.memmap)
    assert rows.dtype == np.uint8
    assert rows.shape == (32 * 4, 1, 28, 28)


def test_processes_make_the_same_set_together(folder, tmp_path, monkeypatch):
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        make(tmp_path / "set")
    assert contents(tmp_path / "set") == contents(folder)


def test_interrupted_it_resumes(folder, tmp_path, monkeypatch):
    original, made = preparing._estimates, []

    def stopping(model, source, description, shard, device):
        if shard == 2 and not made.count("stop"):
            made.append("stop")
            raise KeyboardInterrupt
        made.append(shard)
        return original(model, source, description, shard, device)

    monkeypatch.setattr(preparing, "_estimates", stopping)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "set")
    with pytest.raises(DataError, match="shard-00002"):
        open_prepared(tmp_path / "set", load("digits", "train"), FULL)
    make(tmp_path / "set")
    assert made == [0, 1, "stop", 2, 3]
    assert contents(tmp_path / "set") == contents(folder)


def test_damage_is_found_and_repaired(folder, tmp_path):
    make(tmp_path / "set")
    path = shard_path(tmp_path / "set", 1)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert damage(tmp_path / "set", read_description(tmp_path / "set"), 1) == "does not match its checksum"
    with pytest.raises(DataError, match="shard-00001"):
        open_prepared(tmp_path / "set", load("digits", "train"), FULL)
    make(tmp_path / "set")
    assert contents(tmp_path / "set") == contents(folder)


def test_other_settings_are_refused(folder, tmp_path):
    with pytest.raises(ConfigurationError, match="other settings"):
        make(folder, seed=1)
    source = load("digits", "train")
    with pytest.raises(ConfigurationError, match=r"expected p \[0\.2, 0\.4\], got"):
        open_prepared(folder, source, TrainingConfig(defense=me_net(masks=4, p=(0.2, 0.4))).defense)
    with pytest.raises(ConfigurationError, match="was prepared from other images"):
        open_prepared(folder, load("digits", "test"), FULL)
    with pytest.raises(ConfigurationError, match="run `menet prepare` to make one"):
        open_prepared(tmp_path, source, FULL)
    (tmp_path / DESCRIPTION).write_text("{}")
    with pytest.raises(DataError, match="cannot read"):
        open_prepared(tmp_path, source, FULL)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        make(tmp_path / "file" / "set")


def test_training_takes_the_estimates_in_place_of_masks(folder, tmp_path, monkeypatch):
    from menet import MENet

    used = []

    def preprocess(self, pixels, generator, mask=None):
        used.append(self.training)
        return pixels

    monkeypatch.setattr(MENet, "preprocess", preprocess)
    config = tiny(defense=DEFENSE, objective="standard", prepared=str(folder), limit=64, validation=20, epochs=2)
    run = train(config, tmp_path / "run").folder
    assert used
    assert not any(used), "masks were drawn while training on a prepared set"
    assert isinstance(load_model(run), MENet)
    assert len([row for row in read_log(run) if row["kind"] == "epoch"]) == 2


def test_command(tmp_path, capsys):
    arguments = ["prepare", "digits", "--out", str(tmp_path / "set"), "--estimator", "usvt", "--masks", "2"]
    assert main([*arguments, "--limit", "40"]) == 0
    assert "40 images, 2 estimates each, in 1 shard:" in capsys.readouterr().out
    assert main([*arguments, "--limit", "41"]) == 2
    assert "other settings" in capsys.readouterr().err
    options = [
        "train",
        "digits",
        "--defense",
        "me-net",
        "--estimator",
        "usvt",
        "--masks",
        "2",
        "--model",
        "small",
    ]
    options += ["--prepared", str(tmp_path / "set"), "--validation", "8", "--batch-size", "16", "--epochs", "1"]
    assert main([*options, "--out", str(tmp_path / "run")]) == 0
    assert "test accuracy of the best epoch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["dataset", "images", "copies", "per_shard", "seed", "shape", "fingerprint", "defense"]
)
def test_a_changed_description_is_refused(folder, tmp_path, name):
    """A changed `copies` would give images the labels of others."""
    copy = shutil.copytree(folder, tmp_path / "set")
    found = json.loads((copy / DESCRIPTION).read_text())
    value = found[name]
    found[name] = {
        int: lambda: value * 2 + 1,
        str: lambda: value + "0",
        list: lambda: [1, 14, 56],
        dict: lambda: {**value, "masks": 2},
    }[type(value)]()
    (copy / DESCRIPTION).write_text(json.dumps(found))
    with pytest.raises(DataError, match="does not match its checksum"):
        open_prepared(copy, load("digits", "train"), FULL)
    with pytest.raises(DataError, match="does not match its checksum"):
        make(copy)


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"copies": 2}, "expected copies 4, got 2"),
        ({"copies": 2, "images": 200, "per_shard": 64}, "prepared from other images"),
        ({"images": 50, "per_shard": 16}, "prepared from other images|shard-0000"),
        ({"per_shard": 16}, "shard-00000.npy does not fit"),
        ({"shape": [1, 14, 56]}, "prepared from other images"),
        ({"images": 10**9}, "prepared from other images"),
        ({"images": 0}, "expected positive sizes"),
        ({"per_shard": 0}, "expected positive sizes"),
        ({"copies": 4.0}, "expected positive sizes"),
        ({"shape": [1, 28]}, "expected positive sizes"),
        ({"defense": {"name": "me-net", "masks": 4}}, "was prepared with"),
    ],
    ids=str,
)
def test_a_description_that_lies_with_a_right_checksum_is_refused(folder, tmp_path, changes, words):
    copy = shutil.copytree(folder, tmp_path / "set")
    found = {**json.loads((copy / DESCRIPTION).read_text()), **changes}
    found.pop("sha256")
    lie = Description(**{**found, "shape": tuple(found["shape"])})
    (copy / DESCRIPTION).write_text(lie.as_json())
    with pytest.raises(MenetError, match=words):
        open_prepared(copy, load("digits", "train"), FULL)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'{"sha256": 3}'])
def test_a_description_of_garbage_is_refused(tmp_path, content):
    (tmp_path / DESCRIPTION).write_bytes(content)
    with pytest.raises(DataError, match="cannot read"):
        open_prepared(tmp_path, load("digits", "train"), FULL)


@pytest.mark.parametrize("name", ["shard-00001.npy", "shard-00001.sha256"])
def test_shards_and_checksums_of_garbage_are_refused(folder, tmp_path, name):
    copy = shutil.copytree(folder, tmp_path / "set")
    for content in (
        b"",
        b"\xff\xfe",
        (folder / name).read_bytes()[:-3],
        (folder / "shard-00003.npy").read_bytes(),
        # An array whose header never ends; of a checksum, none.
        (folder / "shard-00001.npy").read_bytes().replace(b"}", b" ", 1),
    ):
        (copy / name).write_bytes(content)
        with pytest.raises(DataError, match="shard-00001"):
            open_prepared(copy, load("digits", "train"), FULL)
