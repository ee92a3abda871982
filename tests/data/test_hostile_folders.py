"""Folders that ask for memory, lead elsewhere, or never end."""

import os
from pathlib import Path

import made_files
import pytest
from PIL import Image

from menet.data import SOURCES, folder, install, load, tiny_imagenet
from menet.data.folder import image_size
from menet.errors import DataError

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::menet.data.DataWarning")]


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """240 hard links to one image of 4000×4000: 50 kB on disk, 11.5 GB decoded."""
    base = tmp_path / "photos"
    for split, count in (("train", 200), ("test", 40)):
        (base / split / "a").mkdir(parents=True)
        for number in range(count):
            os.link(_large(tmp_path), base / split / "a" / f"{number}.png")
    return base


def _large(root: Path) -> Path:
    path = root / "large.png"
    if not path.exists():
        Image.new("L", (4000, 4000)).save(path)
    return path


def test_hard_links_to_a_large_image_ask_in_vain(linked: Path, little_memory: None) -> None:
    with pytest.raises(DataError, match=r"at most 1024×1024 pixels, .*4000×4000.*folder:.*photos@64"):
        load(f"folder:{linked}")


def test_the_total_of_all_images_is_bounded_before_allocating(
    linked: Path, monkeypatch: pytest.MonkeyPatch, little_memory: None
) -> None:
    monkeypatch.setattr(folder, "MAX_TOTAL_PIXELS", 200 * 1024**2)
    with pytest.raises(DataError, match=r"at most 209,715,200 pixels .*240 images of 1024×1024.*photos@64"):
        load(f"folder:{linked}@1024")


def test_normalization_is_measured_within_bounds(tmp_path: Path, little_memory: None) -> None:
    base = tmp_path / "photos"
    Image.new("L", (1024, 1024)).save(tmp_path / "one.png")
    for split, count in (("train", 60), ("test", 1)):
        (base / split / "a").mkdir(parents=True)
        for number in range(count):
            os.link(tmp_path / "one.png", base / split / "a" / f"{number}.png")
    assert folder.read(base, "train").images.shape == (60, 3, 1024, 1024)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MENET_DATA", str(tmp_path / "place"))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.png").write_text("secret")
    return made_files.folder(tmp_path)


def _outside(base: Path) -> None:
    (base / "train" / "notes.txt").symlink_to(base.parent / "secret" / "key.png")


def _outside_folder(base: Path) -> None:
    (base / "train" / "cat" / "more").symlink_to(base.parent / "secret")


def _device(base: Path) -> None:
    (base / "train" / "cat" / "endless.png").symlink_to("/dev/zero")


def _loop(base: Path) -> None:
    (base / "train" / "cat" / "again").symlink_to(base)


def _loop_of_links(base: Path) -> None:
    (base / "train" / "cat" / "one.png").symlink_to("other.png")
    (base / "train" / "cat" / "other.png").symlink_to("one.png")


def _pipe(base: Path) -> None:
    os.mkfifo(base / "train" / "cat" / "pipe.png")


HOSTILE = (_outside, _outside_folder, _device, _loop, _loop_of_links, _pipe)


@pytest.mark.parametrize("plant", HOSTILE)
def test_import_copies_regular_files_of_the_folder_only(images: Path, tmp_path: Path, plant) -> None:
    plant(images)
    with pytest.raises(DataError, match=r"expected only regular files to import, got .*(link|something else)"):
        install.take(SOURCES["folder"], images)
    assert not list((tmp_path / "place").rglob("*")), "nothing is left behind"


def test_import_follows_links_within_the_folder(images: Path, tmp_path: Path) -> None:
    (images / "train" / "cat" / "same.png").symlink_to("0.png")
    copied = install.take(SOURCES["folder"], images) / "train" / "cat" / "same.png"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (images / "train" / "cat" / "0.png").read_bytes()


@pytest.mark.parametrize("file", ["train/n01443537/images/n01443537_0.JPEG", "wnids.txt", "words.txt"])
@pytest.mark.parametrize("target", ["/dev/zero", "/etc/hostname", "pipe"])
def test_import_of_a_published_dataset_follows_no_link_out_of_it(
    images: Path, tmp_path: Path, file, target
) -> None:
    base = made_files.tiny_imagenet(tmp_path / "made")
    path = base / "tiny-imagenet-200" / file
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(DataError, match="expected only regular files"):
        install.take(SOURCES["tiny-imagenet"], base)


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/hostname"])
def test_import_of_single_files_follows_no_link_out_of_the_folder(images: Path, tmp_path: Path, target) -> None:
    base = made_files.mnist(tmp_path / "made")
    (base / "t10k-labels-idx1-ubyte.gz").unlink()
    (base / "t10k-labels-idx1-ubyte.gz").symlink_to(target)
    with pytest.raises(DataError, match="expected only regular files"):
        install.take(SOURCES["mnist"], base)


@pytest.mark.parametrize("plant", [_device, _loop, _loop_of_links, _pipe])
def test_loading_in_place_neither_hangs_nor_loops(images: Path, plant) -> None:
    expected = len(load(f"folder:{images}"))
    plant(images)
    assert len(load(f"folder:{images}")) == expected


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match=r"pipe\.png: not a regular file"):
        image_size(tmp_path / "pipe.png")
    base = made_files.tiny_imagenet(tmp_path)
    os.mkfifo(base / "tiny-imagenet-200/train/n01443537/images/pipe.JPEG")
    with pytest.raises(DataError, match=r"pipe\.JPEG: not a regular file"):
        load("tiny-imagenet", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "train-labels-idx1-ubyte.gz"),
        ("cifar10", "cifar-10-batches-bin/data_batch_1.bin"),
        ("svhn", "train_32x32.mat"),
        ("tiny-imagenet", "tiny-imagenet-200/wnids.txt"),
    ],
)
def test_a_pipe_is_no_file_of_a_dataset(name: str, file: str, tmp_path: Path) -> None:
    path = getattr(made_files, name.replace("-", "_"))(tmp_path) / file
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        load(name, "train", tmp_path)


@pytest.mark.parametrize("wnid", ["../../outside", "..", "/tmp", "a/b", ".", "a\\b", "a\0b"])
def test_classes_that_lead_out_of_tiny_imagenet_are_refused(tmp_path: Path, wnid: str) -> None:
    base = made_files.tiny_imagenet(tmp_path)
    outside = tmp_path / "tiny-imagenet" / "outside" / "images"
    outside.mkdir(parents=True)
    Image.new("L", (64, 64)).save(outside / "secret.JPEG")
    with (base / "tiny-imagenet-200" / "wnids.txt").open("a") as file:
        file.write(f"{wnid}\n")
    with pytest.raises(DataError, match=r"expected class names like n01443537"):
        tiny_imagenet.read(base, "train")


@pytest.mark.parametrize("name", ["val_0\0.JPEG", "../val_0.JPEG", "/etc/passwd", "", ".", ".."])
def test_images_that_lead_out_of_tiny_imagenet_are_refused(tmp_path: Path, name: str) -> None:
    base = made_files.tiny_imagenet(tmp_path)
    annotations = base / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    annotations.write_text(name + annotations.read_text()[annotations.read_text().index("\t") :])
    with pytest.raises(DataError, match="line 1 of"):
        tiny_imagenet.read(base, "test")
