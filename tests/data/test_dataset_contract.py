"""What every dataset promises, checked for all of them; a new dataset is one line in MAKERS."""

import warnings
from pathlib import Path

import made_files
import numpy as np
import pytest
import torch

from menet import data
from menet.data import SPLITS, Dataset, DataWarning, load
from menet.errors import ConfigurationError, DataError

MAKERS = {
    "digits": made_files.digits,
    "mnist": made_files.mnist,
    "cifar10": made_files.cifar10,
    "svhn": made_files.svhn,
    "tiny-imagenet": made_files.tiny_imagenet,
    "folder": made_files.folder,
}

pytestmark = pytest.mark.parametrize("name", MAKERS)


def test_every_dataset_is_here(name: str) -> None:
    assert tuple(MAKERS) == data.NAMES


@pytest.fixture
def root(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MENET_DATA", str(tmp_path))
    MAKERS[name](tmp_path)
    return tmp_path


def loaded(name: str, split: str) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DataWarning)
        return load(name, split)


@pytest.mark.parametrize("split", SPLITS)
def test_shapes_and_kinds(name: str, root: Path, split: str) -> None:
    dataset = loaded(name, split)
    count, channels, height, width = dataset.images.shape
    assert (dataset.name, dataset.split) == (name, split)
    assert count == len(dataset) == len(dataset.images) == len(dataset.labels) > 0
    assert channels in (1, 3)
    assert min(height, width) >= 20
    assert dataset.images[:2].dtype == torch.uint8
    assert dataset.images[:2].shape == (2, channels, height, width)
    assert dataset.labels.dtype == torch.int64
    assert 0 <= dataset.labels.min() <= dataset.labels.max() < len(dataset.classes)
    assert all(isinstance(word, str) and word for word in dataset.classes)
    assert len(set(dataset.classes)) == len(dataset.classes) >= 2
    assert len(dataset.mean) == len(dataset.std) == channels
    assert all(0 < value < 1 for value in (*dataset.mean, *dataset.std))


def test_batches_by_slice_and_by_position_agree(name: str, root: Path) -> None:
    dataset = loaded(name, "train")
    count = len(dataset)
    everything, labels = dataset.batch(slice(None))
    assert everything.dtype == torch.float32
    assert 0 <= everything.min() < everything.max() <= 1
    assert torch.equal((everything * 255).round().to(torch.uint8), dataset.images[:])
    positions = torch.tensor([count - 1, 0, 3, 3, -2])
    some, some_labels = dataset.batch(positions)
    assert torch.equal(some, everything[positions])
    assert torch.equal(some_labels, labels[positions])
    backwards = torch.arange(count).flip(0)
    assert torch.equal(dataset.batch(backwards)[0], everything.flip(0))
    assert torch.equal(dataset.images[1:count:3], dataset.images[:][1:count:3])
    assert dataset.batch(slice(0, 0))[0].shape == (0, *everything.shape[1:])


def test_positions_outside_are_refused(name: str, root: Path) -> None:
    dataset = loaded(name, "test")
    for position in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset.images[torch.tensor([position])]


def test_loading_again_gives_the_same_and_splits_differ(name: str, root: Path) -> None:
    first, second, test = loaded(name, "train"), loaded(name, "train"), loaded(name, "test")
    assert torch.equal(first.images[:], second.images[:])
    assert torch.equal(first.labels, second.labels)
    assert (first.classes, first.mean, first.std) == (test.classes, test.mean, test.std)
    assert not torch.equal(first.images[:10], test.images[:10])


def test_changing_a_batch_changes_no_file(name: str, root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    dataset = loaded(name, "train")
    images, _ = dataset.batch(slice(0, 4))
    images.zero_()
    dataset.images[0:4].zero_()
    dataset.images[torch.tensor([0])].zero_()
    fresh = loaded(name, "train").images[0:4]
    assert fresh.any()
    assert all(path.read_bytes() == content for path, content in before.items())


def test_global_randomness_is_left_alone(name: str, root: Path) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    loaded(name, "train")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_bad_arguments_say_what_is_accepted(name: str, root: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown split 'validation'; choose from train, test"):
        load(name, "validation")
    with pytest.raises(ConfigurationError, match=f"unknown dataset '{name}x'; choose from digits"):
        load(f"{name}x")
    if name != "folder":
        with pytest.raises(ConfigurationError, match="side"):
            load(name, side=32)


def test_absent_data_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    if name == "digits":
        assert len(load(name, root=tmp_path / "nowhere")) == 4_000
        return
    with pytest.raises(DataError) as caught:
        load(name, root=tmp_path / "nowhere")
    remedy = "folder per class" if name == "folder" else f"menet data import {name}"
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("split", SPLITS)
def test_a_prefix_mixes_classes(name: str, root: Path, split: str) -> None:
    dataset = loaded(name, split)
    half = dataset.labels[: len(dataset) // 2]
    assert len(half.unique()) == min(len(dataset.labels.unique()), len(half))
