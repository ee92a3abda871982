"""What baselines that learn from images share."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from menet.errors import ConfigurationError


def sample(images: Any, count: int, generator: torch.Generator) -> Float[Tensor, "n c h w"]:
    """At most `count` of `images`, drawn without replacement, on [0, 1].

    `images` is a float tensor on [0, 1], or bytes as datasets hold them: a tensor, or anything that has a length
    and returns a tensor for an index tensor.
    """
    if not len(images):
        raise ConfigurationError("images is empty; accepted is at least one image")
    chosen = torch.randperm(len(images), generator=generator)[:count].sort().values
    picked: Tensor = images[chosen.to(images.device) if isinstance(images, Tensor) else chosen]
    if picked.ndim != 4:
        raise ConfigurationError(f"images has shape {tuple(picked.shape)}; accepted is (n, c, h, w)")
    return picked / 255 if picked.dtype == torch.uint8 else picked
