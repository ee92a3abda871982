"""Grids of images: originals, masked, estimated, adversarial; one function draws them all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from menet.errors import ConfigurationError
from menet.evaluation.records import Records
from menet.evaluation.snapshots import unpack
from menet.report.figures import FAINT, INK, Axes, Figure, plain, sheet, styled

WRONG = "#b3261e"


@dataclass(frozen=True)
class Tile:
    """An image on [0,1] with a title above and a caption below."""

    image: Float[Tensor, "c h w"]
    title: str = ""
    caption: str = ""
    color: str = FAINT
    """Of the caption."""


def image_grid(
    rows: Sequence[Sequence[Tile | None]], title: str = "", *, inches: float = 1.05, font: float = 9
) -> Figure:
    """Tiles in rows, `inches` wide each; None leaves a place empty."""
    columns = max(map(len, rows))
    heights = [_row_height(row, inches, font) for row in rows]
    with styled():
        above = 0.35 * max(1, font / 9) if title else 0.05
        figure = sheet(inches * columns, sum(heights) + above)
        places = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for row, across in zip(rows, places, strict=True):
            for position, place in enumerate(across):
                tile = row[position] if position < len(row) else None
                if tile is None:
                    place.set_visible(False)
                    continue
                _show(place, tile.image)
                place.set_title(plain(tile.title), fontsize=font, loc="center")
                place.set_xlabel(plain(tile.caption), fontsize=font - 1, labelpad=2, color=tile.color)
        if title:
            figure.suptitle(plain(title), x=0.01, ha="left", fontsize=font + 2)
    return figure


def reconstruction_grid(
    images: Float[Tensor, "b c h w"],
    masked: Float[Tensor, "b c h w"],
    estimates: Mapping[str, Float[Tensor, "b c h w"]],
    title: str = "",
) -> Figure:
    """One row per image: original | masked | each estimate with its PSNR, all on [0,1]."""
    return image_grid(reconstruction_tiles(images, masked, estimates), title)


def reconstruction_tiles(
    images: Float[Tensor, "b c h w"],
    masked: Float[Tensor, "b c h w"],
    estimates: Mapping[str, Float[Tensor, "b c h w"]],
) -> list[list[Tile | None]]:
    """The tiles of `reconstruction_grid`; the first row has the titles."""
    columns = {"original": images, "masked": masked, **estimates}
    for name, column in columns.items():
        if column.shape != images.shape:
            raise ConfigurationError(f"expected {name} of shape {tuple(images.shape)}, got {tuple(column.shape)}")
    rows: list[list[Tile | None]] = []
    for number, original in enumerate(images):
        rows.append([])
        for name, column in columns.items():
            caption = psnr(_error(column[number], original)) if name in estimates else ""
            rows[-1].append(Tile(column[number], "" if number else name.replace("-", " "), caption))
    return rows


def psnr(error: float) -> str:
    """The peak signal-to-noise ratio of images on [0,1] with this root mean square error."""
    return f"PSNR {-20 * math.log10(error):.1f} dB" if error > 0 else "exact"


def snapshots(records: Records, most: int = 4) -> Figure | None:
    """One example per row: clean, adversarial, perturbation, and what the network sees behind a defense.

    Below each image stand the predicted class and its probability, red if it is wrong. The perturbation is
    scaled to be visible; gray is zero.
    """
    rows = [row for row in records.rows if "snapshots" in row][:most]
    if not rows:
        return None
    names = records.evaluation["dataset"].get("class_names") or []
    seen = "clean_seen" in rows[0]["snapshots"]
    scale = _scale(rows)
    defense = records.evaluation["model"].get("defense") or {}
    done = "estimated" if defense.get("name") == "me-net" else "processed"
    titles = {"clean": "clean", "adversarial": "adversarial", "perturbation": f"perturbation ×{scale:g}"}
    if seen:
        titles |= {"clean_seen": f"clean,\n{done}", "adversarial_seen": f"adversarial,\n{done}"}
    grid: list[list[Tile | None]] = []
    for number, row in enumerate(rows):
        grid.append([])
        for column, title in titles.items():
            kept, title = row["snapshots"], "" if number else title
            if column == "perturbation":
                true = f"true: {_name(names, row['label'])}"
                grid[-1].append(Tile(0.5 + scale * _perturbation(kept), title, true, INK))
                continue
            answer = kept[column]
            caption = f"{_name(names, answer['prediction'])}  {answer['probability']:.0%}"
            wrong = answer["prediction"] != row["label"]
            grid[-1].append(Tile(unpack(answer["image"]), title, caption, WRONG if wrong else INK))
    # Five columns are shown as wide as three, so their words are larger.
    return image_grid(grid, inches=1.28, font=11 if seen else 9)


def _row_height(row: Sequence[Tile | None], inches: float, font: float) -> float:
    tiles = [tile for tile in row if tile is not None]
    tallest = max((tile.image.shape[-2] / tile.image.shape[-1] for tile in tiles), default=0.0)
    titles = max((tile.title.count("\n") + 1 for tile in tiles if tile.title), default=0)
    captions = int(any(tile.caption for tile in tiles))
    return inches * tallest + (titles + captions) * 1.4 * font / 72 + 0.06


def _show(place: Axes, image: Float[Tensor, "c h w"]) -> None:
    """Draw one image on [0,1] without axes; small ones pixel by pixel."""
    pixels = image.detach().cpu().clamp(0, 1).numpy()
    gray = len(pixels) == 1
    place.imshow(
        pixels[0] if gray else pixels.transpose(1, 2, 0),
        cmap="gray" if gray else None,
        vmin=0,
        vmax=1,
        interpolation="nearest" if max(pixels.shape[1:]) <= 128 else "antialiased",
    )
    place.set_xticks([])
    place.set_yticks([])
    place.grid(visible=False)
    for spine in place.spines.values():
        spine.set_visible(False)


def _error(image: Tensor, original: Tensor) -> float:
    return float((image.double() - original.double()).square().mean().sqrt())


def _perturbation(kept: dict[str, Any]) -> Tensor:
    return unpack(kept["adversarial"]["image"]) - unpack(kept["clean"]["image"])


def _scale(rows: Sequence[dict[str, Any]]) -> float:
    """The largest round factor at which no perturbation leaves the scale."""
    most = max(float(_perturbation(row["snapshots"]).abs().max()) for row in rows)
    return next((factor for factor in (50.0, 20.0, 10.0, 5.0, 2.0) if factor * most <= 0.5 + 1e-6), 1.0)


def _name(names: Sequence[str], label: int) -> str:
    name = str(names[label]) if 0 <= label < len(names) else str(label)
    return name if len(name) <= 14 else name[:13] + "…"
