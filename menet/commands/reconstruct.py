"""`menet reconstruct`: mask image files and estimate them back, side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from menet.commands import Json, Output, printing
from menet.commands.options import Device
from menet.errors import ConfigurationError, DataError

LONGEST_SIDE = 2048
WIDEST = 640
"""Most pixels that one image of the picture is wide."""


@dataclass(frozen=True)
class Reconstruct:
    """Mask images at random and estimate them back: original, masked and estimated, with the PSNR.

    Images may have up to 2048 pixels a side; the time grows with the cube of the shorter side (224×224 in color
    takes well under a second). Several images make one row each.
    """

    images: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE [IMAGE …]", help_behavior_hint="")
    ]
    """Image files (PNG, JPEG, …)."""
    p: float = 0.5
    """Observation probability: the fraction of values that is kept."""
    estimator: Literal["usvt", "soft-impute", "nuclear-norm", "tubal", "all"] = "nuclear-norm"
    """How the masked values are estimated; all shows every estimator."""
    channels: Literal["joint", "separate"] = "joint"
    """joint: one matrix [R G B], values masked independently; separate: a matrix per channel, pixels masked."""
    out: Path = Path("reconstruction.png")
    """The PNG file to write."""
    seed: int = 0
    """Seed of the random mask."""
    device: Device = "auto"
    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        if not self.images:
            raise ConfigurationError("expected at least one image file: menet reconstruct IMAGE …")
        if not 0 <= self.p <= 1:
            raise ConfigurationError(f"expected 0 <= p <= 1, got {self.p:g}")
        from menet.commands.options import device_of
        from menet.estimators import ESTIMATORS
        from menet.files import replacing
        from menet.progress import track
        from menet.report.pictures import image_grid, reconstruction_tiles

        names = [name for name in ESTIMATORS if self.estimator in (name, "all") and name != "mask-only"]
        device = device_of(self.device)
        pictures = [_read(path) for path in self.images]
        rows, told = [], []
        for path, image in zip(self.images, track(pictures, "estimating"), strict=True):
            masked, estimates = reconstructions(image.to(device), names, self.p, self.channels, self.seed)
            masked, estimates = masked.cpu(), {name: one.cpu() for name, one in estimates.items()}
            (row,) = reconstruction_tiles(image, masked, estimates)
            told += [f"{path}: {tile.title}, {tile.caption}" for tile in row if tile and tile.caption]
            rows.append(row)
        if len(rows) == 1 and len(rows[0]) > 4:
            rows = [rows[0][:3], rows[0][3:]]
        width = max(image.shape[-1] for image in pictures)
        # Small images are enlarged until their pixels can be seen, large ones shrunk; words grow with them.
        inches = min(WIDEST, max(width, 192)) / 100
        title = f"p = {self.p:g}, {self.channels} channels"
        figure = image_grid(rows, title, inches=inches, font=max(8, 2.4 * inches))
        try:
            with replacing(self.out) as temporary:
                figure.savefig(temporary, format="png", dpi=100)
        except OSError as error:
            raise DataError(f"cannot write {self.out}: {error.strerror or error}") from error
        out.value(written=self.out, estimates=told)
        print("\n".join([*told, f"wrote {self.out}"]))
        return 0


def reconstructions(
    images: Any, names: list[str], p: float, channels: Literal["joint", "separate"] = "joint", seed: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Images masked at random, and what each named estimator makes of them, all under the same mask."""
    import torch
    from torch import nn

    from menet import masks
    from menet.defense import MENet
    from menet.estimators import build

    b, c, h, w = images.shape
    mask = masks.bernoulli((b, c if channels == "joint" else 1, h, w), p, torch.Generator().manual_seed(seed))
    estimates = {}
    for name in ("mask-only", *names):
        model = MENet(nn.Identity(), build(name), p, channels=channels)
        estimates[name] = model.estimate(images, mask.to(images.device))
    return estimates.pop("mask-only"), estimates


def _read(path: Path) -> Any:
    from menet.data.folder import ImageFiles, image_size

    height, width = image_size(path)
    if max(height, width) > LONGEST_SIDE:
        raise DataError(
            f"expected at most {LONGEST_SIDE} pixels a side, got {width}×{height} in {path}; shrink it first"
        )
    return ImageFiles([path], height, width)[slice(0, 1)].float() / 255
