"""Any folder of images in class folders.

Either `PATH/train/CLASS/*` with `PATH/test/CLASS/*` (or `val` for `test`), or `PATH/CLASS/*`, which is split
by a hash of each file's name: one in five is a test image, and adding files never moves others across.
"""

import hashlib
from pathlib import Path

import torch

from menet.data.dataset import Dataset
from menet.data.image_files import ImageFiles, image_size
from menet.errors import ConfigurationError, DataError

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
TEST_SHARE = 5
MEASURED_IMAGES = 1_000

Listing = list[tuple[Path, str]]


def read(folder: Path, split: str, side: int | None = None) -> Dataset:
    """Read one split as RGB; with `side`, images are scaled and cropped to `side`×`side`.

    Without it all images must have one size. The normalisation is measured on up to 1,000 training images, so
    both splits recommend the same.
    """
    if side is not None and not 1 <= side <= 1024:
        raise ConfigurationError(f"side is {side}; it must be between 1 and 1024")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of images; give one that holds a folder per class")
    listings = {name: _listing(folder, name) for name in ("train", "test")}
    everything = listings["train"] + listings["test"]
    classes = sorted({name for _, name in everything})
    if not listings[split]:
        raise DataError(f"{folder} holds no {split} images in class folders ({', '.join(sorted(ENDINGS))})")
    height, width = (side, side) if side else _common_size([path for path, _ in everything])
    files = {
        name: ImageFiles([path for path, _ in listing], height, width, resized=side is not None)
        for name, listing in listings.items()
    }
    mean, std = _statistics(files["train"] if len(files["train"]) else files[split])
    labels = {name: number for number, name in enumerate(classes)}
    return Dataset(
        name="folder",
        split=split,
        images=files[split],
        labels=torch.tensor([labels[name] for _, name in listings[split]]),
        classes=tuple(classes),
        mean=mean,
        std=std,
    )


def _listing(folder: Path, split: str) -> Listing:
    if (folder / "train").is_dir():
        held_out = next((name for name in ("test", "val") if (folder / name).is_dir()), "test")
        return _class_folders(folder / ("train" if split == "train" else held_out))
    return [(path, name) for path, name in _class_folders(folder) if _is_test(path) == (split == "test")]


def _class_folders(folder: Path) -> Listing:
    if not folder.is_dir():
        return []
    return [
        (path, place.name)
        for place in sorted(folder.iterdir())
        if place.is_dir() and not place.name.startswith(".")
        for path in sorted(place.rglob("*"))
        if path.suffix.lower() in ENDINGS and path.is_file()
    ]


def _is_test(path: Path) -> bool:
    name = f"{path.parent.name}/{path.name}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % TEST_SHARE == 0


def _common_size(paths: list[Path]) -> tuple[int, int]:
    first = image_size(paths[0])
    for path in paths[1:]:
        size = image_size(path)
        if size != first:
            one, other = (f"{width}×{height}" for height, width in (first, size))
            raise DataError(f"{paths[0]} is {one} pixels and {path} is {other}: give `side` to make all one size")
    return first


def _statistics(files: ImageFiles) -> tuple[tuple[float, ...], tuple[float, ...]]:
    step = -(-len(files) // MEASURED_IMAGES)
    sample = files[::step].to(torch.float32).div_(255)
    std, mean = torch.std_mean(sample, dim=(0, 2, 3))
    # A folder of blank images has no spread; dividing by it would make its pixels infinite.
    return tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist())
