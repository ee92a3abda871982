"""Snapshots: the few images of an evaluation that its rows keep, for the report to show."""

import base64
import zlib
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from menet.attacks.base import Model
from menet.preprocessed import Preprocessed


def pack(image: Float[Tensor, "c h w"]) -> dict[str, Any]:
    """An image in [0,1] as text, to the last bit of float32."""
    content = np.ascontiguousarray(image.detach().float().cpu().numpy()).astype("<f4").tobytes()
    return {"shape": list(image.shape), "zlib": base64.b64encode(zlib.compress(content, 6)).decode()}


def unpack(packed: dict[str, Any]) -> Float[Tensor, "c h w"]:
    """The image that `pack` packed."""
    content = zlib.decompress(base64.b64decode(packed["zlib"]))
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32)).reshape(packed["shape"])


@torch.no_grad()
def snapshot(
    model: Model, clean: Float[Tensor, "b c h w"], adversarial: Float[Tensor, "b c h w"], seed: int
) -> list[dict[str, Any]]:
    """For each example the clean and the adversarial image, each with the model's prediction.

    With preprocessing also `clean_seen` and `adversarial_seen`: the preprocessed images, both under the same
    draw. `clean` and `adversarial` are then classified by the network alone (the paper's last figure), unless
    it takes codes that only the preprocessing produces.
    """
    shown = {"clean": clean, "adversarial": adversarial}
    logits: dict[str, Tensor] = {}
    for name, images in list(shown.items()):
        if isinstance(model, Preprocessed):
            seen = model.reconstruct(images, torch.Generator().manual_seed(seed))
            shown[f"{name}_seen"] = model.visible(seen)
            logits[f"{name}_seen"] = model.classifier(seen)
            direct = seen.shape == images.shape
            logits[name] = model.classifier(images) if direct else logits[f"{name}_seen"]
        else:
            logits[name] = model(images)
    snapshots: list[dict[str, Any]] = [{} for _ in clean]
    for name, images in shown.items():
        probabilities = logits[name].softmax(-1)
        for number, one in enumerate(snapshots):
            best = int(probabilities[number].argmax())
            one[name] = {
                "image": pack(images[number]),
                "prediction": best,
                "probability": float(probabilities[number, best]),
            }
    return snapshots
