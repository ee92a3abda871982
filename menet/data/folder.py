"""Any folder of images in class folders, as RGB.

Either `PATH/train/CLASS/*` with `PATH/test/CLASS/*` (or `val` for `test`), or just `PATH/CLASS/*`. The latter is
split by a hash of each file's name: one image in five is a test image, and adding files never moves others from
one split to the other. Examples are in the order of another hash of their names, so that every prefix mixes the
classes, whatever the order of the file system.

Images of one size are used as they are; `folder:PATH@64` scales the shorter side to 64 and crops the center.
"""

import hashlib
from pathlib import Path

import torch

from menet.data.dataset import Dataset, encoded, order_of
from menet.data.image_files import ImageFiles, UnreadableImage, image_size, unreadable
from menet.errors import ConfigurationError, DataError

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
ONE_IN = 5
MAX_SIDE = 1024
# Decoded, 6 GB on disk: half a million images of 64×64, or 42,000 of 224×224.
MAX_TOTAL_PIXELS = 1 << 31
# Images that the normalization is measured on: their number, and what they take in memory (200 MB as floats).
MEASURED_IMAGES, MEASURED_PIXELS = 1_000, 1 << 24

Listing = list[tuple[Path, str]]


def read(folder: Path, split: str, side: int | None = None) -> Dataset:
    """Read one split; with `side`, images are scaled and center-cropped to `side`×`side`.

    Without it all images must have one size, at most 1024×1024. The normalization is measured on up to 1,000
    training images, so both splits recommend the same. All files that cannot be read are listed in one error.
    """
    if side is not None and not 1 <= side <= MAX_SIDE:
        raise ConfigurationError(f"expected a side between 1 and {MAX_SIDE}, got {side}")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; expected a folder of images with one folder per class")
    listings = {name: _listing(folder, name) for name in ("train", "test")}
    everything = [path for listing in listings.values() for path, _ in listing]
    classes = sorted({name for listing in listings.values() for _, name in listing})
    if not listings[split]:
        endings = ", ".join(sorted(ENDINGS))
        raise DataError(f"{folder} holds no {split} images; expected files in class folders ({endings})")
    try:
        height, width = (side, side) if side else _common_size(folder, everything)
        # Before anything is allocated: the headers of a few hard links can claim any amount of memory.
        if len(everything) * height * width > MAX_TOTAL_PIXELS:
            raise DataError(
                f"expected at most {MAX_TOTAL_PIXELS:,} pixels in {folder}, got {len(everything):,} images "
                f"of {width}×{height}; choose a smaller side, such as {_sided(folder)}"
            )
        files = {
            name: ImageFiles([path for path, _ in listing], height, width, side is not None, everything)
            for name, listing in listings.items()
        }
        mean, std = _statistics(files["train"] if len(files["train"]) else files[split])
    except UnreadableImage as error:
        raise unreadable(everything) from error
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
    found = [
        (path, place.name)
        for place in folder.iterdir()
        if place.is_dir() and not place.name.startswith(".")
        for path in place.rglob("*")
        # Regular files only: neither pipes nor devices, whatever their names.
        if path.suffix.lower() in ENDINGS and path.is_file()
    ]
    return sorted(found, key=lambda example: order_of(example[0].relative_to(folder).as_posix()))


def _is_test(path: Path) -> bool:
    name = encoded(f"{path.parent.name}/{path.name}")
    return int.from_bytes(hashlib.sha256(name).digest()[:4]) % ONE_IN == 0


def _common_size(folder: Path, paths: list[Path]) -> tuple[int, int]:
    first = image_size(paths[0])
    for path in paths:
        size = image_size(path)
        if size != first:
            one, other = (f"{width}×{height}" for height, width in (first, size))
            raise DataError(
                f"expected images of one size, got {paths[0]} with {one} and {path} with {other} pixels; "
                f"scale and crop them with {_sided(folder)}"
            )
    height, width = first
    if height * width > MAX_SIDE**2:
        raise DataError(
            f"expected images of at most {MAX_SIDE}×{MAX_SIDE} pixels, got {paths[0]} with {width}×{height}; "
            f"scale and crop them with {_sided(folder)}"
        )
    return first


def _sided(folder: Path) -> str:
    return f"folder:{folder}@64"


def _statistics(files: ImageFiles) -> tuple[tuple[float, ...], tuple[float, ...]]:
    count = max(1, min(MEASURED_IMAGES, MEASURED_PIXELS // (files.height * files.width)))
    sample = files[:: -(-len(files) // count)].to(torch.float32).div_(255)
    std, mean = torch.std_mean(sample, dim=(0, 2, 3))
    # A folder of blank images has no spread; dividing by it would make its pixels infinite.
    return tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist())
