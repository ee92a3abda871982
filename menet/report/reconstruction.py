"""Pictures of what matrix estimation does: each image, what is left of it under a mask, and every estimate."""

from collections.abc import Mapping

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from menet.errors import ConfigurationError
from menet.report.style import FAINT, sheet, styled


def grid(
    images: Float[Tensor, "b c h w"],
    masked: Float[Tensor, "b c h w"],
    estimates: Mapping[str, Float[Tensor, "b c h w"]],
    title: str = "",
) -> Figure:
    """One row per image: original | masked | each estimate, in the order given, all on [0,1].

    Under each estimate stands its root mean square error against the original, in pixels of [0,1].
    """
    columns = {"original": images, "masked": masked, **estimates}
    for name, column in columns.items():
        if column.shape != images.shape:
            raise ConfigurationError(f"{name} has shape {tuple(column.shape)}, the images {tuple(images.shape)}")
    rows, (height, width) = len(images), images.shape[-2:]
    cell = 1.05
    with styled():
        figure = sheet(cell * len(columns), (cell * height / width + 0.12) * rows + (0.7 if title else 0.4))
        places = figure.subplots(rows, len(columns), squeeze=False)
        for position, (name, column) in enumerate(columns.items()):
            for row in range(rows):
                place = places[row, position]
                show_image(place, column[row])
                if row == 0:
                    place.set_title(name.replace("-", " "), fontsize=9.5, loc="center")
                if name in estimates:
                    error = (column[row].double() - images[row].double()).square().mean().sqrt().item()
                    place.set_xlabel(f"error {error:.3f}", fontsize=8, labelpad=2, color=FAINT)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def show_image(place: Axes, image: Float[Tensor, "c h w"]) -> None:
    """Draw one image on [0,1], pixel by pixel, without axes."""
    pixels = image.detach().cpu().clamp(0, 1).numpy()
    gray = len(pixels) == 1
    place.imshow(
        pixels[0] if gray else pixels.transpose(1, 2, 0),
        cmap="gray" if gray else None,
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    place.set_xticks([])
    place.set_yticks([])
    place.grid(visible=False)
    for spine in place.spines.values():
        spine.set_visible(False)
