"""Images stored as one file each, and `folder`: any folder of images in class folders, as RGB.

Either `PATH/train/CLASS/*` with `PATH/test/CLASS/*` (or `val` for `test`), or just `PATH/CLASS/*`. The latter is
split by a hash of each file's name: one image in five is a test image, and adding files never moves others from
one split to the other. Examples are in the order of another hash of their names, so that every prefix mixes the
classes, whatever the order of the file system.

Images of one size are used as they are; `folder:PATH@64` scales the shorter side to 64 and crops the center, and
`folder:PATH@64,skip-unreadable` leaves out files that cannot be decoded.
Files are decoded when indexed, or once into a memory-mapped file of bytes.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from menet.data.dataset import Dataset, Images, Index, cache_folder, encoded, order_of, positions_of, warn_once
from menet.errors import ConfigurationError, DataError
from menet.files import replacing, write_atomically
from menet.progress import reporting

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
ONE_IN = 5
MAX_SIDE = 1024
# Decoded, 6 GB on disk: half a million images of 64×64, or 42,000 of 224×224.
MAX_TOTAL_PIXELS = 1 << 31
# Images that the normalization is measured on: their number, and what they take in memory (200 MB as floats).
MEASURED_IMAGES, MEASURED_PIXELS = 1_000, 1 << 24
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
MAX_PIXELS = 64 << 20
CHUNK = 256
LISTED = 10

Listing = list[tuple[Path, str]]


class UnreadableImage(DataError):
    """A file that cannot be decoded as an image."""


class ImageFiles:
    """Image files as RGB bytes `(n, 3, height, width)`, decoded at each use.

    With `resized`, the shorter side of an image is scaled to fit and the center is cropped; without it, an image
    of another size than `height`×`width` is an error that names the file. `others` are files that belong to the
    same folder: an error about unreadable files lists theirs too.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        height: int,
        width: int,
        resized: bool = False,
        others: Sequence[Path] = (),
    ) -> None:
        self.paths, self.others = tuple(paths), tuple(others)
        self.height, self.width, self.resized = height, width, resized

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.paths), 3, self.height, self.width)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Index) -> UInt8[Tensor, "b 3 h w"]:
        positions = positions_of(index, len(self)).tolist()
        out = np.empty((len(positions), 3, self.height, self.width), np.uint8)
        # Pillow releases the interpreter lock while it decodes, so threads help.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, pixels in enumerate(pool.map(self._decode, positions)):
                out[number] = pixels
        return torch.from_numpy(out)

    def _decode(self, position: int) -> np.ndarray:
        path = self.paths[position]
        with _opened(path) as image:
            # Before decoding, which allocates as many bytes as the header claims.
            if not self.resized and image.size != (self.width, self.height):
                size = f"{image.width}×{image.height}"
                raise DataError(f"expected {self.width}×{self.height} pixels in {path}, got {size}")
            pixels = image.convert("RGB")
            if self.resized:
                pixels = ImageOps.fit(pixels, (self.width, self.height), Image.Resampling.BICUBIC)
            return np.asarray(pixels).transpose(2, 0, 1)


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, from its header alone."""
    with _opened(path) as image:
        return image.height, image.width


def unreadable(paths: Sequence[Path]) -> UnreadableImage:
    """One error for all of these files that cannot be decoded; it names the first ten and counts the rest."""
    problems = list(_problems(paths).values())
    if len(problems) == 1:
        return UnreadableImage(problems[0])
    listed = "; ".join(problems[:LISTED])
    rest = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return UnreadableImage(f"{len(problems)} images cannot be read; repair or remove them: {listed}{rest}")


def packed(files: ImageFiles, name: str, folder: Path) -> Tensor | Images:
    """The same images from a memory-mapped file in the user's cache, written the first time.

    The file is keyed by the name, size and modification time of every image: after a change the folder is
    decoded anew, and the outdated file is removed. Without a writable cache, images are decoded at each use.
    """
    place = hashlib.sha256(encoded(str(folder.resolve()))).hexdigest()[:12]
    target = cache_folder() / "decoded" / f"{name}-{place}-{_key(files)}.u8"
    try:
        if not target.exists() or target.stat().st_size != math.prod(files.shape):
            _pack(files, target, name)
            for former in target.parent.glob(f"{name}-{place}-*.u8"):
                if former != target:
                    former.unlink(missing_ok=True)
        # Copy-on-write, because torch warns about read-only arrays; the file is never changed.
        return torch.from_numpy(np.memmap(target, np.uint8, mode="c", shape=files.shape))
    except (OSError, ValueError) as error:
        warn_once(f"{name} is decoded at each use, which is slow: cannot write {target} ({error})")
        return files


def read(folder: Path, split: str, side: int | None = None, skip_unreadable: bool = False) -> Dataset:
    """Read one split; with `side`, images are scaled and center-cropped to `side`×`side`.

    Without it all images must have one size, at most 1024×1024. The normalization is measured on up to 1,000
    training images, so both splits recommend the same. All files that cannot be read are listed in one error, or
    in a warning if they are to be skipped.
    """
    if side is not None and not 1 <= side <= MAX_SIDE:
        raise ConfigurationError(f"expected a side between 1 and {MAX_SIDE}, got {side}")
    if not folder.is_dir():
        raise DataError(f"expected a folder of images with one folder per class, got {folder}")
    listings = {name: _listing(folder, name) for name in ("train", "test")}
    everything = [path for listing in listings.values() for path, _ in listing]
    if skip_unreadable and (skipped := _skipped(folder, everything)):
        listings = {name: [one for one in listing if one[0] not in skipped] for name, listing in listings.items()}
        everything = [path for path in everything if path not in skipped]
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
        total=None if (folder / "train").is_dir() else len(everything),
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


def _skipped(folder: Path, paths: Sequence[Path]) -> set[Path]:
    """The files that cannot be decoded; found once and kept in the user's cache until a file changes."""
    kept = cache_folder() / "decoded" / f"unreadable-{_fingerprint(paths)}.json"
    try:
        known = set(json.loads(kept.read_bytes()))
        found = {path for path in paths if str(path) in known}
    except (OSError, ValueError, TypeError, RecursionError):
        found = set(_problems(paths))
        with suppress(OSError):
            write_atomically(kept, json.dumps(sorted(map(str, found))))
    if found:
        names = [path.relative_to(folder).as_posix() for path in sorted(found)]
        rest = ", …" if len(names) > LISTED else ""
        warn_once(
            f"skipped {len(names)} of {len(paths)} images in {folder} that cannot be read: "
            f"{', '.join(names[:LISTED])}{rest}"
        )
    return found


def _problems(paths: Sequence[Path]) -> dict[Path, str]:
    """What is wrong with each of the files that cannot be decoded."""

    def problem(path: Path) -> str | None:
        try:
            with _opened(path) as image:
                image.convert("RGB")
        except UnreadableImage as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {path: found for path, found in zip(paths, pool.map(problem, paths), strict=True) if found}


def _statistics(files: ImageFiles) -> tuple[tuple[float, ...], tuple[float, ...]]:
    count = max(1, min(MEASURED_IMAGES, MEASURED_PIXELS // (files.height * files.width)))
    sample = files[:: -(-len(files) // count)].to(torch.float32).div_(255)
    std, mean = torch.std_mean(sample, dim=(0, 2, 3))
    # A folder of blank images has no spread; dividing by it would make its pixels infinite.
    return tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist())


def _pack(files: ImageFiles, target: Path, name: str) -> None:
    with replacing(target) as temporary, temporary.open("wb") as out:
        with reporting(f"decoding {name}", len(files)) as reporter:
            for start in range(0, len(files), CHUNK):
                try:
                    piece = files[start : start + CHUNK]
                except UnreadableImage as error:
                    raise unreadable(files.paths + files.others) from error
                out.write(piece.numpy().tobytes())
                reporter.advance(len(piece))
        out.flush()


def _key(files: ImageFiles) -> str:
    key = f"{files.height} {files.width} {files.resized} {_fingerprint(files.paths)}"
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _fingerprint(paths: Sequence[Path]) -> str:
    """A hash of names, sizes and modification times."""
    key = hashlib.sha256()
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        key.update(encoded(f"{path.parent.name}/{path.name} {state.st_size} {state.st_mtime_ns}\n"))
    return key.hexdigest()[:24]


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image of which only the header was read; whatever fails while it is used is an `UnreadableImage`."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait forever for somebody to write to it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UnreadableImage(f"cannot read {path}: not a regular file")
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    size = f"{image.width}×{image.height}"
                    raise UnreadableImage(f"expected at most {MAX_PIXELS} pixels in {path}, got {size}")
                yield image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"cannot read {path}: not a {', '.join(FORMATS)} image") from error
    except OSError as error:
        raise UnreadableImage(f"cannot read {path}: {error.strerror or error}") from error
    # A decoder given damaged bytes may raise nearly anything; to the user it all means the same.
    except Exception as error:
        raise UnreadableImage(f"cannot read {path}: damaged image ({error})") from error
