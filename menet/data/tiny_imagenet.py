"""Tiny-ImageNet: 200 classes of 500 + 50 photographs, 64×64, three channels, one JPEG each.

The publisher's test images have no labels, so `test` is the publisher's `val`, as in the paper.
"""

from pathlib import Path

import torch

from menet.data.dataset import Dataset
from menet.data.image_files import ImageFiles
from menet.data.places import require
from menet.errors import DataError

FOLDER = "tiny-imagenet-200"
SIDE = 64
MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)


def read(folder: Path, split: str) -> Dataset:
    """Read one split; the JPEGs are decoded when asked for, greyscale ones to three channels."""
    base = require(folder / FOLDER, "tiny-imagenet")
    wnids = [line.strip() for line in _lines(base / "wnids.txt") if line.strip()]
    if not wnids or len(set(wnids)) != len(wnids):
        raise DataError(f"{base / 'wnids.txt'} lists no classes, or one of them twice")
    listed = _train(base, wnids) if split == "train" else _validation(base, wnids)
    if not listed:
        where = base / ("train" if split == "train" else "val/val_annotations.txt")
        raise DataError(f"{where} holds no images of the classes in wnids.txt")
    paths, labels = zip(*listed, strict=True)
    return Dataset(
        name="tiny-imagenet",
        split=split,
        images=ImageFiles(paths, SIDE, SIDE),
        labels=torch.tensor(labels),
        classes=_class_names(base, wnids),
        mean=MEAN,
        std=STD,
    )


def _train(base: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    listed = []
    for label, wnid in enumerate(wnids):
        folder = require(base / "train" / wnid / "images", "tiny-imagenet")
        listed += [(path, label) for path in sorted(folder.glob("*.JPEG"))]
    return listed


def _validation(base: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    annotations = base / "val" / "val_annotations.txt"
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    listed = []
    for number, line in enumerate(_lines(annotations), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        if wnid not in label_of or Path(name).name != name:
            raise DataError(f"line {number} of {annotations} names no image of a class in wnids.txt")
        listed.append((base / "val" / "images" / name, label_of[wnid]))
    return listed


def _class_names(base: Path, wnids: list[str]) -> tuple[str, ...]:
    names = dict(line.split("\t", 1) for line in _lines(base / "words.txt") if "\t" in line)
    first = [names.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
    # Two kinds of crane, say, stay apart by their numbers.
    return tuple(
        name if first.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(first, wnids, strict=True)
    )


def _lines(path: Path) -> list[str]:
    require(path, "tiny-imagenet")
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
