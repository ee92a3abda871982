"""Folders of image files: how they are split, named when broken, and decoded once."""

import os
from pathlib import Path

import made_files
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from menet.data import DataWarning, absolute, load, tiny_imagenet
from menet.data.dataset import order_of, warn_once
from menet.data.folder import ImageFiles
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


def ordered(folder: Path) -> list[Path]:
    """The images of a folder in the documented order, by a hash of their relative names."""
    return sorted(folder.rglob("*.png"), key=lambda path: order_of(path.relative_to(folder).as_posix()))


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


def test_all_unreadable_files_are_listed_at_once(flat: Path) -> None:
    """Without a header, truncated in either split, and not an image at all."""
    broken = sorted((flat / "a").iterdir())[:13]
    for number, path in enumerate(broken):
        path.write_bytes(path.read_bytes()[: (0, 60, 100)[number % 3]])
    for name in (f"folder:{flat}", f"folder:{flat}@16"):
        with pytest.raises(DataError, match=r"^13 images cannot be read.*; and 3 more; or leave out") as caught:
            load(name, "test")
        assert sum(str(path) in str(caught.value) for path in broken) == 10
    for path in broken[:-2]:
        path.unlink()
    with pytest.raises(DataError, match=r"^2 images cannot be read") as caught:
        load(f"folder:{flat}")
    assert all(str(path) in str(caught.value) for path in broken[-2:])


def test_unreadable_files_are_skipped_on_request_and_named(flat: Path) -> None:
    broken = sorted((flat / "a").iterdir())[:3]
    for path in broken:
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError) as caught:
        load(f"folder:{flat}", "test")
    remedy = str(caught.value).rpartition(" ")[2]
    assert remedy == f"folder:{flat},skip-unreadable"
    for again in range(2):
        warn_once.cache_clear()
        with pytest.warns(DataWarning, match=r"skipped 3 of 120 images in .*: a/0\.png, ") as told:
            splits = [load(remedy, split) for split in ("train", "test")]
        assert len(told) == 1, again
        assert [split.total for split in splits] == [117, 117]
        assert sum(map(len, splits)) == 117
    assert load(f"folder:{flat}@4,skip-unreadable", "test").images.shape[1:] == (3, 4, 4)
    assert len(load(f"folder:{flat}", "test", skip_unreadable=True)) == len(splits[1])
    broken[0].unlink()
    warn_once.cache_clear()
    with pytest.warns(DataWarning, match="skipped 2 of 119 images"):
        load(remedy, "test")
    with pytest.raises(ConfigurationError, match="only folder:PATH takes them"):
        load("digits", skip_unreadable=True)


def test_a_name_holds_in_another_working_directory(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(flat.parent)
    for ending in ("", "@4", ",skip-unreadable", "@4,skip-unreadable"):
        assert absolute(f"folder:images{ending}") == f"folder:{flat}{ending}"
    assert absolute("folder@64") == "folder@64"
    assert absolute("mnist") == "mnist"
    (flat.parent / "odd@64").mkdir()
    assert absolute("folder:odd@64") == f"folder:{flat.parent}/odd@64"


def test_different_sizes_need_a_side_and_name_two_files(tmp_path: Path) -> None:
    base = made_files.folder(tmp_path)
    other = base / "train" / "dog" / "2.png"
    Image.fromarray(made_files.pixels(0, 30, 50, 3)).save(other)
    with pytest.raises(DataError, match=r"one size, .*dog/2\.png with 50×30 .*with folder:(\S+)@64") as caught:
        load("folder", "train", base)
    assert load(str(caught.value).rpartition(" ")[2], "train").images.shape == (12, 3, 64, 64)
    dataset = load(f"folder:{base}@16", "train")
    assert dataset.images.shape == (12, 3, 16, 16)
    expected = ImageOps.fit(Image.open(other), (16, 16), Image.Resampling.BICUBIC)
    position = ordered(base / "train").index(other)
    assert (dataset.images[position].numpy() == np.asarray(expected).transpose(2, 0, 1)).all()
    assert torch.equal(load("folder", "train", base, side=16).images[:], dataset.images[:])
    assert torch.equal(load("folder@16", "train", base).images[:], dataset.images[:])
    with pytest.raises(ConfigurationError, match="expected a side between 1 and 1024, got 0"):
        load("folder", "train", base, side=0)
    with pytest.raises(ConfigurationError, match=r"expected one side, got 16 in .* and 32"):
        load(f"folder:{base}@16", side=32)


def test_a_folder_whose_name_looks_like_a_side_is_that_folder(tmp_path: Path) -> None:
    base = made_files.folder(tmp_path).rename(tmp_path / "photos@64")
    assert load(f"folder:{base}").images.shape[2:] == (20, 24)
    assert load(f"folder:{base}@16").images.shape[2:] == (16, 16)


def test_a_folder_without_its_prefix_is_told_how_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made_files.folder(tmp_path).parent)
    Path("photos").mkdir()
    with pytest.raises(ConfigurationError, match=r"unknown dataset 'photos'; .* write folder:photos"):
        load("photos")


def test_a_prefix_of_a_class_ordered_folder_holds_several_classes(flat: Path) -> None:
    for split, count in (("train", 16), ("test", 8)):
        assert load("folder", split, flat).labels[:count].unique().tolist() == [0, 1]


def test_the_order_is_that_of_names_and_not_of_the_file_system(
    flat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load("folder", "train", flat)
    listed, searched = Path.iterdir, Path.rglob
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self), reverse=True)))
    monkeypatch.setattr(Path, "rglob", lambda self, name: iter(sorted(searched(self, name), reverse=True)))
    after = load("folder", "train", flat)
    assert torch.equal(after.labels, before.labels)
    assert torch.equal(after.images[:], before.images[:])
    monkeypatch.undo()
    moved = load("folder", "train", flat.rename(flat.parent / "elsewhere"))
    assert torch.equal(moved.images[:], before.images[:]), "the order does not depend on where the folder is"


def test_tiny_imagenet_mixes_its_classes_by_name(tmp_path: Path) -> None:
    base = made_files.tiny_imagenet(tmp_path)
    names = {}
    for split in ("train", "test"):
        images = tiny_imagenet.read(base, split).images
        assert isinstance(images, ImageFiles)
        names[split] = [path.name for path in images.paths]
        assert names[split] == sorted(names[split], key=order_of)
        assert names[split] != sorted(names[split])
    annotations = base / "tiny-imagenet-200/val/val_annotations.txt"
    annotations.write_text("\n".join(reversed(annotations.read_text().splitlines())) + "\n")
    images = tiny_imagenet.read(base, "test").images
    assert isinstance(images, ImageFiles)
    assert [path.name for path in images.paths] == names["test"]


def test_normalization_is_that_of_the_training_images(tmp_path: Path) -> None:
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
    assert (load("tiny-imagenet", "test", tmp_path).images.flatten(1).any(1)).sum() == 11
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
    with pytest.warns(DataWarning, match="decoded at each use"):
        dataset = load("folder", "train", base)
    assert isinstance(dataset.images, ImageFiles)
    assert dataset.batch(torch.tensor([3, 1]))[0].shape == (2, 3, 20, 24)
