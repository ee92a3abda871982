"""Tiny-ImageNet: 200 classes of 500 + 50 photographs, 64×64, three channels, one JPEG each.

The publisher's test images have no labels, so `test` is the publisher's `val`, as in the paper. The training
files are sorted by class; both splits are read in the order of a hash of the file's name, which mixes classes.
"""

import re
from pathlib import Path

import torch

from menet.data.dataset import Dataset, order_of, require_file
from menet.data.folder import ImageFiles
from menet.errors import DataError

FOLDER = "tiny-imagenet-200"
SIDE = 64
MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
# A class is the name of a folder: one that held `../` would be read from anywhere on the disk.
WNID = re.compile(r"\w[\w-]*")


def read(folder: Path, split: str) -> Dataset:
    """Read one split; the JPEGs are decoded when indexed, grayscale ones to three channels."""
    base = require_file(folder / FOLDER, "tiny-imagenet")
    wnids = [line.strip() for line in _lines(base / "wnids.txt") if line.strip()]
    if not wnids or len(set(wnids)) != len(wnids):
        raise DataError(f"expected a list of distinct classes in {base / 'wnids.txt'}")
    for wnid in wnids:
        if not WNID.fullmatch(wnid):
            raise DataError(f"expected class names like n01443537 in {base / 'wnids.txt'}, got {wnid!r:.80}")
    listed = _train(base, wnids) if split == "train" else _validation(base, wnids)
    if not listed:
        where = base / ("train" if split == "train" else "val/val_annotations.txt")
        raise DataError(f"expected images of the classes in wnids.txt in {where}, got none")
    paths, labels = zip(*sorted(listed, key=lambda example: order_of(example[0].name)), strict=True)
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
        folder = require_file(base / "train" / wnid / "images", "tiny-imagenet")
        listed += [(path, label) for path in sorted(folder.glob("*.JPEG"))]
    return listed


def _validation(base: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    annotations = base / "val" / "val_annotations.txt"
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    listed = []
    for number, line in enumerate(_lines(annotations), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        if wnid not in label_of or Path(name).name != name or name in ("", "..") or "\0" in name:
            raise DataError(f"expected an image and a class in line {number} of {annotations}, got {line!r:.60}")
        listed.append((base / "val" / "images" / name, label_of[wnid]))
    return listed


def _class_names(base: Path, wnids: list[str]) -> tuple[str, ...]:
    names = dict(line.split("\t", 1) for line in _lines(base / "words.txt") if "\t" in line)
    first = [names.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
    # Classes that share a first name, such as two kinds of crane, are told apart by their identifiers.
    return tuple(
        name if first.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(first, wnids, strict=True)
    )


def _lines(path: Path) -> list[str]:
    require_file(path, "tiny-imagenet")
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
