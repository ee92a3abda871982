"""Images stored as one file each: decoded when indexed, or once into a memory-mapped file of bytes."""

import hashlib
import math
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from menet.data.dataset import Images, Index, cache_folder, encoded, positions_of, warn_once
from menet.errors import DataError
from menet.files import replacing
from menet.progress import reporting

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
MAX_PIXELS = 64 << 20
CHUNK = 256
LISTED = 10


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

    def problem(path: Path) -> str | None:
        try:
            with _opened(path) as image:
                image.convert("RGB")
        except UnreadableImage as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [found for found in pool.map(problem, paths) if found]
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
    key = hashlib.sha256(f"{files.height} {files.width} {files.resized}".encode())
    for path in files.paths:
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
