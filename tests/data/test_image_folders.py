"""Folders of image files: how they are split, named when broken, and decoded once."""

import os
from pathlib import Path

import made_files
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from menet.data import DataWarning, load
from menet.data.image_files import ImageFiles
from menet.errors import ConfigurationError, DataError

pytestmark = pytest.mark.filterwarnings("ignore::menet.data.DataWarning")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder of classes with no train and test of its own."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for count in range(60):
            Image.fromarray(made_files.pixels(count, 8, 8, 3)).save(tmp_path / f"images/{name}/{count}.png")
    return tmp_path / "images"


def pictures(folder: Path, split: str) -> set[bytes]:
    return {image.numpy().tobytes() for image in load("folder", split, folder).images[:]}


def test_a_split_by_name_is_stable(flat: Path) -> None:
    train, test = load("folder", "train", flat), load("folder", "test", flat)
    assert len(train) + len(test) == 120
    assert 10 <= len(test) <= 40
    assert train.classes == ("a", "b")
    before = pictures(flat, "test")
    for count in range(100, 150):
        Image.fromarray(made_files.pixels(count, 8, 8, 3)).save(flat / f"a/{count}.png")
    assert before <= pictures(flat, "test")


def test_val_serves_as_test(tmp_path: Path) -> None:
    base = made_files.folder(tmp_path)
    expected = load("folder", "test", base)
    (base / "test").rename(base / "val")
    assert torch.equal(load(f"folder:{base}", "test").images[:], expected.images[:])


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    base = made_files.folder(tmp_path)
    broken = base / "train" / "dog" / "2.png"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=str(broken)):
        load("folder", "train", base)


def test_different_sizes_need_a_side_and_name_two_files(tmp_path: Path) -> None:
    base = made_files.folder(tmp_path)
    other = base / "train" / "dog" / "2.png"
    Image.fromarray(made_files.pixels(0, 30, 50, 3)).save(other)
    with pytest.raises(DataError, match=r"0\.png is 24×20 pixels and .*dog/2\.png is 50×30.*side"):
        load("folder", "train", base)
    dataset = load("folder", "train", base, side=16)
    assert dataset.images.shape == (12, 3, 16, 16)
    expected = ImageOps.fit(Image.open(other), (16, 16), Image.Resampling.BICUBIC)
    position = 6 + 2
    assert (dataset.images[position].numpy() == np.asarray(expected).transpose(2, 0, 1)).all()
    with pytest.raises(ConfigurationError, match="side is 0"):
        load("folder", "train", base, side=0)


def test_normalisation_is_that_of_the_training_images(tmp_path: Path) -> None:
    base = made_files.folder(tmp_path)
    images, _ = load("folder", "train", base).batch(slice(None))
    assert torch.allclose(torch.tensor(load("folder", "test", base).mean), images.mean((0, 2, 3)))
    assert torch.allclose(
        torch.tensor(load("folder", "test", base).std), images.transpose(0, 1).flatten(1).std(1)
    )


def test_images_are_decoded_once_and_again_when_changed(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_files.tiny_imagenet(tmp_path)
    first = load("tiny-imagenet", "test", tmp_path).images
    assert isinstance(first, torch.Tensor)
    (kept,) = own_cache.rglob("*.u8")
    assert kept.stat().st_size == 12 * 3 * 64 * 64
    with monkeypatch.context() as patched:
        patched.setattr(ImageFiles, "__getitem__", lambda *_: pytest.fail("decoded a second time"))
        assert torch.equal(load("tiny-imagenet", "test", tmp_path).images, first)
    path = tmp_path / "tiny-imagenet/tiny-imagenet-200/val/images/val_0_1.JPEG"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(path)
    assert not load("tiny-imagenet", "test", tmp_path).images[1].any()
    assert len(list(own_cache.rglob("*.u8"))) == 1, "what was made for the former state is removed"


def test_a_damaged_cache_file_is_not_used(tmp_path: Path, own_cache: Path) -> None:
    made_files.tiny_imagenet(tmp_path)
    first = load("tiny-imagenet", "test", tmp_path).images[:].clone()
    (kept,) = own_cache.rglob("*.u8")
    os.truncate(kept, 100)
    assert torch.equal(load("tiny-imagenet", "test", tmp_path).images[:], first)
    assert kept.stat().st_size == first.numel()


def test_without_a_place_for_the_cache_images_stay_files(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / "menet").write_text("a file where a folder is needed")
    base = made_files.folder(tmp_path)
    with pytest.warns(DataWarning, match="decoded anew"):
        dataset = load("folder", "train", base)
    assert isinstance(dataset.images, ImageFiles)
    assert dataset.batch(torch.tensor([3, 1]))[0].shape == (2, 3, 20, 24)
