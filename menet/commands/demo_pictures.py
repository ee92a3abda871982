"""Real images that come with the package, masked and estimated by every method."""

from importlib.resources import files

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from menet import masks
from menet.defense import MENet
from menet.errors import DataError
from menet.estimators import ESTIMATORS, build
from menet.images import to_matrix
from menet.progress import track
from menet.report.reconstruction import grid

NAMES = ("cifar10_00_3.png", "cifar10_01_8.png", "cifar10_03_0.png", "cifar10_07_6.png")
P = 0.5


def embedded() -> Float[Tensor, "b 3 32 32"]:
    """A few CIFAR-10 images, which foolbox ships for its own examples."""
    folder = files("foolbox") / "data"
    images = []
    for name in NAMES:
        try:
            with (folder / name).open("rb") as file, Image.open(file) as picture:
                images.append(torch.from_numpy(np.array(picture.convert("RGB"))))
        except OSError as error:
            raise DataError(f"{name} (of the package foolbox) cannot be read: {error}") from error
    return torch.stack(images).permute(0, 3, 1, 2).float() / 255


def reconstruction(seed: int = 0) -> Figure:
    """Embedded images, half of their entries dropped, beside what each estimator makes of the rest."""
    images = embedded()
    mask = masks.bernoulli(images.shape, P, torch.Generator().manual_seed(seed))
    estimates = {}
    for name in track([name for name in ESTIMATORS if name != "mask-only"], "estimating"):
        model = MENet(nn.Identity(), build(name), P)
        # The matrix [R G B] of a mask is made like that of an image; a tensor keeps its channels.
        wide = len(model.mask_shape(images)) == 2
        estimates[name] = model.estimate(images, to_matrix(mask.float(), "joint") > 0 if wide else mask)
    return grid(images, images * mask, estimates, f"{1 - P:.0%} of the values dropped, then estimated")
