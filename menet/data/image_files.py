"""Images kept as one file each: decoded when asked for, or once into a memory-mapped file of bytes."""

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from menet.data.dataset import Images, Index, notice_once, positions_of
from menet.data.places import cache_folder
from menet.errors import DataError
from menet.files import replacing
from menet.progress import reporting

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
MAXIMUM_PIXELS = 64 << 20
CHUNK = 256


class ImageFiles:
    """Image files read as RGB bytes `(n, 3, side, side)` or `(n, 3, height, width)`, decoded at each use.

    With `resized`, an image is scaled until its shorter side fits and the middle is cut out; without it, an
    image of another size than `height`×`width` is an error that names the file.
    """

    def __init__(self, paths: Sequence[Path], height: int, width: int, resized: bool = False) -> None:
        self.paths = tuple(paths)
        self.height, self.width, self.resized = height, width, resized

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.paths), 3, self.height, self.width)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Index) -> UInt8[Tensor, "b 3 h w"]:
        positions = positions_of(index, len(self)).tolist()
        out = np.empty((len(positions), 3, self.height, self.width), np.uint8)
        # Pillow lets go of the interpreter while it decodes, so threads do help.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, pixels in enumerate(pool.map(self._decode, positions)):
                out[number] = pixels
        return torch.from_numpy(out)

    def _decode(self, position: int) -> np.ndarray:
        path = self.paths[position]
        try:
            with _opened(path) as image:
                # Before decoding, which would make as many bytes as the header claims.
                if not self.resized and image.size != (self.width, self.height):
                    size = f"{image.width}×{image.height}"
                    raise DataError(f"{path} is {size} pixels where {self.width}×{self.height} is expected")
                pixels = image.convert("RGB")
                if self.resized:
                    pixels = ImageOps.fit(pixels, (self.width, self.height), Image.Resampling.BICUBIC)
        except DataError:
            raise
        # A decoder given damaged bytes may raise nearly anything; all of it means the same to the user.
        except Exception as error:
            raise DataError(f"{path} is not a readable image: {error}") from error
        return np.asarray(pixels).transpose(2, 0, 1)


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, from its header alone."""
    try:
        with _opened(path) as image:
            return image.height, image.width
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a readable image: {error}") from error


def packed(files: ImageFiles, name: str, folder: Path) -> Tensor | Images:
    """The same images from a memory-mapped file in the user's cache, which is written the first time.

    The file is keyed to the name, size and time of change of every image: an edited folder is decoded anew,
    and the file made for its former state is removed. Where there is no place for it, the images stay files.
    """
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    target = cache_folder() / "decoded" / f"{name}-{place}-{_key(files)}.u8"
    try:
        if not target.exists() or target.stat().st_size != math.prod(files.shape):
            _pack(files, target, name)
            for former in target.parent.glob(f"{name}-{place}-*.u8"):
                if former != target:
                    former.unlink(missing_ok=True)
        # Copy-on-write, because torch warns of arrays that nobody may write to; the file is never changed.
        return torch.from_numpy(np.memmap(target, np.uint8, mode="c", shape=files.shape))
    except (OSError, ValueError) as error:
        notice_once(f"{name} is decoded anew at each use, which is slow: {target} cannot be kept ({error})")
        return files


def _pack(files: ImageFiles, target: Path, name: str) -> None:
    with replacing(target) as temporary, temporary.open("wb") as out:
        with reporting(f"decoding {name}", len(files)) as reporter:
            for start in range(0, len(files), CHUNK):
                piece = files[start : start + CHUNK]
                out.write(piece.numpy().tobytes())
                reporter.advance(len(piece))
        out.flush()


def _key(files: ImageFiles) -> str:
    key = hashlib.sha256(f"{files.height} {files.width} {files.resized}".encode())
    for path in files.paths:
        try:
            state = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        key.update(f"{path.parent.name}/{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return key.hexdigest()[:24]


def _opened(path: Path) -> Image.Image:
    image = Image.open(path, formats=FORMATS)
    if image.width * image.height > MAXIMUM_PIXELS:
        image.close()
        raise DataError(f"{path} claims {image.width}×{image.height} pixels; at most {MAXIMUM_PIXELS} are read")
    return image
