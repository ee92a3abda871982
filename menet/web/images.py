"""The images of the page: samples that come with it, uploads that nobody has checked, and PNG for the browser."""

import base64
import binascii
import io
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from menet.errors import ConfigurationError, DataError, require
from menet.web.workers import MAX_UPLOAD

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
MAX_PIXELS = 24 << 20
"""Of an uploaded image, by its header: decoded it takes four bytes for each."""
LONGEST_SIDE = 96
"""Larger images are shrunk, so that an estimate takes milliseconds."""
SAMPLES = 8
"""Images of the network's own test set; crops of photographs are added to them."""
PHOTO_SIDE = 64


class Sample(NamedTuple):
    """An image that comes with the page; without a label, it is not of the network's dataset."""

    name: str
    title: str
    image: Tensor
    label: int | None


def decoded(data: bytes) -> Float[Tensor, "1 3 h w"]:
    """An uploaded image, shrunk to at most 96 pixels a side; nothing is decoded before its header is checked."""
    if len(data) > MAX_UPLOAD:
        raise DataError(f"this file is too large; please choose one of at most {MAX_UPLOAD >> 20} MB")
    many = "this image has too many pixels; please choose one of at most 24 million"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:
                raise DataError(many)
            # Of a JPEG, no more is decoded than will be shown.
            file.draft("RGB", (2 * LONGEST_SIDE, 2 * LONGEST_SIDE))
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off and not scale
                image = Image.fromarray((np.asarray(image) / 256).clip(0, 255).astype(np.uint8))
            if "A" in image.getbands() or "transparency" in image.info:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert("RGB")
            if max(image.size) > LONGEST_SIDE:
                scale = LONGEST_SIDE / max(image.size)
                size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
                image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(many) from error
    except UnidentifiedImageError as error:
        raise DataError(f"this file is not an image; please choose a {', '.join(FORMATS)} file") from error
    # A decoder given damaged bytes may raise nearly anything; to the user it all means the same.
    except Exception as error:
        raise DataError("this image is damaged or incomplete; please choose another file") from error
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)[None].float() / 255


def picture(image: Float[Tensor, "c h w"]) -> str:
    """An image as a data address of a PNG file, which a browser shows as it is."""
    pixels = (image.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    drawn = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    out = io.BytesIO()
    drawn.save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def unpacked(text: str) -> bytes:
    """The bytes of a file that a request holds as text."""
    try:
        return base64.b64decode(text.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError("this image is damaged or incomplete; please choose another file") from error


def fitted(image: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The middle of an image in the network's size and number of channels."""
    side = min(image.shape[-2:])
    top, left = ((length - side) // 2 for length in image.shape[-2:])
    middle = image[..., top : top + side, left : left + side]
    scaled = nn.functional.interpolate(middle, shape[-2:], mode="bilinear", antialias=True).clamp(0, 1)
    if scaled.shape[1] == shape[0]:
        return scaled
    gray = scaled.mean(1, keepdim=True)
    return gray.expand(-1, shape[0], -1, -1).contiguous()


def first_of_each(dataset: Any) -> list[Sample]:
    """The first test images of different classes."""
    found: dict[int, int] = {}
    for position, label in enumerate(dataset.labels.tolist()):
        found.setdefault(label, position)
        if len(found) == min(SAMPLES, len(dataset.classes)):
            break
    chosen = sorted(found.items())
    images, _ = dataset.batch(torch.tensor([position for _, position in chosen]))
    name = dataset.name.partition(":")[0]
    return [
        Sample(f"{name}-{position}", f"{name}: {dataset.classes[label]}", image, label)
        for (label, position), image in zip(chosen, images, strict=True)
    ]


def photographs() -> list[Sample]:
    """Crops of the photographs that scikit-learn brings; without it the page has none."""
    try:
        china, flower = require("sklearn.datasets", extra="demo").load_sample_images().images
    except ConfigurationError:
        return []
    crops = {
        "roof": china[150:278, 260:388],
        "tower": china[20:148, 40:168],
        "petals": flower[220:348, 420:548],
        "leaves": flower[120:248, 160:288],
    }
    step = 128 // PHOTO_SIDE
    return [
        Sample(f"photo-{name}", f"photograph: {name}", _bytes(crop[::step, ::step]), None)
        for name, crop in crops.items()
    ]


def _bytes(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255
