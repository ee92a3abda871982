"""`menet reconstruct`: what the defense makes of image files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from menet import masks
from menet.data.image_files import ImageFiles, image_size
from menet.defense import MENet
from menet.errors import ConfigurationError, DataError
from menet.estimators import ESTIMATORS, build
from menet.files import replacing
from menet.progress import track

LONGEST_SIDE = 2048
GAP = 8
CAPTION = 26
TILE = 192


@dataclass(frozen=True)
class Reconstruct:
    """Drop values of images at random and estimate them back: original, masked, estimated, side by side.

    Images may have any size up to 2048 pixels a side; the time grows with the cube of the shorter side (224×224
    in colour takes well under a second). With several images the picture has one row for each.
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Image files (PNG, JPEG, …)."""
    p: float = 0.5
    """The share of values that is kept, from 0 to 1."""
    estimator: Literal["usvt", "soft-impute", "nuclear-norm", "tensor", "all"] = "nuclear-norm"
    """How the rest is estimated; `all` shows every method."""
    channels: Literal["joint", "separate"] = "joint"
    """One matrix [R G B] with its values masked independently, or whole pixels masked and channels apart."""
    out: Path = Path("reconstruction.png")
    """The picture to write, a PNG file."""
    seed: int = 0
    """Which random mask."""

    def __call__(self) -> int:
        if not self.images:
            raise ConfigurationError("name at least one image file: menet reconstruct IMAGE …")
        if not 0 <= self.p <= 1:
            raise ConfigurationError(f"--p is {self.p:g}; accepted are shares from 0 to 1")
        names = [name for name in ESTIMATORS if self.estimator in (name, "all") and name != "mask-only"]
        pictures = [_read(path) for path in self.images]
        rows = [self._row(picture, names) for picture in track(pictures, "estimating")]
        sheet = _sheet(rows, ["original", f"masked, p = {self.p:g}", *names])
        try:
            with replacing(self.out) as temporary:
                sheet.save(temporary, format="PNG")
        except OSError as error:
            raise DataError(f"cannot write {self.out}: {error.strerror or error}") from error
        print(f"wrote {self.out}")
        return 0

    def _row(self, image: Tensor, names: list[str]) -> list[Tensor]:
        """The image, what is left of it, and each estimate, all under the same mask of its values."""
        _, c, h, w = image.shape
        shape = (1, c, h, w) if self.channels == "joint" else (1, 1, h, w)
        mask = masks.bernoulli(shape, self.p, torch.Generator().manual_seed(self.seed))
        estimates = []
        for name in ("mask-only", *names):
            model = MENet(nn.Identity(), build(name), self.p, channels=self.channels)
            wide = self.channels == "joint" and len(model.mask_shape(image)) == 2
            estimates.append(model.estimate(image, mask.movedim(1, 2).flatten(2) if wide else mask))
        return [image, *estimates]


def _read(path: Path) -> Tensor:
    height, width = image_size(path)
    if max(height, width) > LONGEST_SIDE:
        raise DataError(
            f"{path} is {width}×{height} pixels; at most {LONGEST_SIDE} a side are estimated: shrink it first"
        )
    return ImageFiles([path], height, width)[slice(0, 1)].float() / 255


def _sheet(rows: list[list[Tensor]], captions: list[str]) -> Image.Image:
    """Rows of pictures under a line of captions; small pictures are enlarged until single pixels can be seen."""
    font = ImageFont.load_default(14)
    tiles = [[_tile(picture) for picture in row] for row in rows]
    captioned = [max([font.getlength(text), *(row[i].width for row in tiles)]) for i, text in enumerate(captions)]
    lefts = [GAP + int(sum(captioned[:position])) + GAP * position for position in range(len(captions))]
    height = CAPTION + GAP + sum(row[0].height + GAP for row in tiles)
    sheet = Image.new("RGB", (lefts[-1] + int(captioned[-1]) + GAP, height), "white")
    draw = ImageDraw.Draw(sheet)
    for left, text in zip(lefts, captions, strict=True):
        draw.text((left, GAP), text, fill="black", font=font)
    top = CAPTION + GAP
    for row in tiles:
        for left, tile in zip(lefts, row, strict=True):
            sheet.paste(tile, (left, top))
        top += row[0].height + GAP
    return sheet


def _tile(picture: Tensor) -> Image.Image:
    _, _, h, w = picture.shape
    factor = max(1, TILE // max(h, w))
    pixels = (picture[0] * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels).resize((w * factor, h * factor), Image.Resampling.NEAREST)
