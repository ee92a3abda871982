"""500 truncations and byte flips of each format end in the project's error or in data of the right shape."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import made_files
import pytest

from menet import data
from menet.data.dataset import Dataset
from menet.errors import DataError

MUTATIONS = 500

# Format: what makes it, the dataset that reads it, and the file that is damaged.
FORMATS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "idx.gz images": (made_files.mnist, "mnist", "t10k-images-idx3-ubyte.gz"),
    "idx.gz labels": (made_files.mnist, "mnist", "t10k-labels-idx1-ubyte.gz"),
    "idx images": (lambda root: made_files.mnist(root, False), "mnist", "t10k-images-idx3-ubyte"),
    "idx labels": (lambda root: made_files.mnist(root, False), "mnist", "t10k-labels-idx1-ubyte"),
    "cifar binary": (made_files.cifar10, "cifar10", "cifar-10-batches-bin/test_batch.bin"),
    "cifar pickle 2": (made_files.cifar10_python, "cifar10", "cifar-10-batches-py/test_batch"),
    "cifar pickle 5": (
        lambda root: made_files.cifar10_python(root, 5),
        "cifar10",
        "cifar-10-batches-py/test_batch",
    ),
    "mat compressed": (made_files.svhn, "svhn", "test_32x32.mat"),
    "mat plain": (lambda root: made_files.svhn(root, False), "svhn", "test_32x32.mat"),
    "tiny jpeg": (made_files.tiny_imagenet, "tiny-imagenet", "tiny-imagenet-200/val/images/val_0_1.JPEG"),
    "tiny annotations": (
        made_files.tiny_imagenet,
        "tiny-imagenet",
        "tiny-imagenet-200/val/val_annotations.txt",
    ),
    "tiny classes": (made_files.tiny_imagenet, "tiny-imagenet", "tiny-imagenet-200/wnids.txt"),
    "folder png": (made_files.folder, "folder", "test/cat/3.png"),
}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Truncated, or with up to four bytes changed; half of the changes are where headers are."""
    if chance.random() < 0.3:
        return content[: chance.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        reach = min(len(changed), 200) if chance.random() < 0.5 else len(changed)
        changed[chance.randrange(reach)] = chance.randrange(256)
    return bytes(changed)


def check_whole(dataset: Dataset, intact: Dataset) -> None:
    images = dataset.images[:]
    assert images.shape == (len(dataset), *intact.images.shape[1:])
    assert dataset.labels.shape == (len(dataset),)
    assert 0 <= dataset.labels.min() <= dataset.labels.max() < len(dataset.classes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_told_or_harmless(name: str, tmp_path: Path, little_memory: None) -> None:
    make, dataset, file = FORMATS[name]
    folder = make(tmp_path)
    read = data.source(dataset).read
    intact = read(folder, "test")
    check_whole(intact, intact)
    content, chance = (folder / file).read_bytes(), random.Random(name)
    refused = []
    for _ in range(MUTATIONS):
        (folder / file).write_bytes(damaged(content, chance))
        try:
            check_whole(read(folder, "test"), intact)
        except DataError as error:
            refused.append(str(error))
    assert refused
    assert not [message for message in refused if "\n" in message or len(message) > 600]
    if name == "tiny jpeg":
        assert len(refused) < MUTATIONS, "a flipped pixel must not be refused"


@pytest.mark.parametrize("name", FORMATS)
def test_empty_and_missing_files_are_told_by_name(name: str, tmp_path: Path) -> None:
    make, dataset, file = FORMATS[name]
    folder = make(tmp_path)
    (folder / file).write_bytes(b"")
    with pytest.raises(DataError, match=Path(file).name.split("-idx")[0].split(".")[0]):
        data.source(dataset).read(folder, "test").images[:]
    (folder / file).unlink()
    if dataset != "folder":
        with pytest.raises(DataError, match=Path(file).name.split("-idx")[0].split(".")[0]):
            data.source(dataset).read(folder, "test").images[:]
    shutil.rmtree(folder)
    with pytest.raises(DataError):
        data.source(dataset).read(folder, "test")
