"""Snapshots, the few images of an evaluation that its rows keep, and their penultimate features.

The report shows the images, and computes t-SNE and class distances from the features.
"""

import base64
import json
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from menet import seeding
from menet.attacks.base import Model
from menet.errors import RecordError
from menet.evaluation import provenance
from menet.evaluation.records import Records, shard_path
from menet.files import write_atomically
from menet.preprocessed import Preprocessed, evaluation_mode
from menet.seeding import reseed

FEATURES_SUFFIX = ".features.safetensors"
LARGEST = 2**26
"""Bytes of an image in a record, at most."""
_ARRAYS = ("labels", "clean", "adversarial")


def pack(image: Float[Tensor, "c h w"]) -> dict[str, Any]:
    """An image in [0,1] as text, to the last bit of float32."""
    content = np.ascontiguousarray(image.detach().float().cpu().numpy()).astype("<f4").tobytes()
    return {"shape": list(image.shape), "zlib": base64.b64encode(zlib.compress(content, 6)).decode()}


def unpack(packed: dict[str, Any]) -> Float[Tensor, "c h w"]:
    """The image that `pack` packed; what is not one, or larger than it says, is refused before it unpacks."""
    try:
        shape = [int(side) for side in packed["shape"]]
        size = 4 * math.prod(shape)
        if len(shape) != 3 or min(shape) < 1 or size > LARGEST:
            raise ValueError(f"shape {shape}")
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(packed["zlib"]), size + 1)
        if len(content) != size:
            raise ValueError(f"expected {size} bytes, got another number")
    except (ValueError, TypeError, KeyError, OverflowError, zlib.error) as error:
        raise RecordError(f"a record holds an image that cannot be read: {error}") from error
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32)).reshape(shape)


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


@dataclass(frozen=True)
class Features:
    """Penultimate features of clean and adversarial images, by example."""

    label: str
    """The attack."""
    labels: np.ndarray
    clean: np.ndarray
    adversarial: np.ndarray


@torch.no_grad()
def features_of(model: nn.Module, records: Records, batch_size: int = 256) -> Features:
    """The features of `model` for the snapshots in `records`, under one fresh draw each.

    `model` must have `features(images)`, as all networks of `menet.models` and their defenses do.
    """
    kept = [row for row in records.rows if "snapshots" in row]
    if not kept:
        raise RecordError(
            f"expected snapshots in the records of {records.label!r}, got none; evaluate with --snapshots"
        )
    if not hasattr(model, "features"):
        raise RecordError(f"expected a model with a method `features`, got a {type(model).__name__}")
    if provenance.weights_hash(model) != records.evaluation["model"]["weights"]:
        raise RecordError(
            f"expected the model that the records of {records.label!r} were measured on, got another one"
        )
    reseed(model, seeding.batch_seed(int(records.evaluation["seed"]), "pictures", records.label, 0))
    device = next(model.parameters(), torch.empty(0)).device
    vectors = {}
    with evaluation_mode(model):
        for kind in ("clean", "adversarial"):
            images = torch.stack([unpack(row["snapshots"][kind]["image"]) for row in kept])
            found = [model.features(part.to(device)) for part in images.split(batch_size)]  # type: ignore[operator]
            vectors[kind] = torch.cat(found).float().cpu().numpy()
    return Features(records.label, np.array([row["label"] for row in kept]), **vectors)


def save_features(features: Features, folder: str | os.PathLike[str]) -> Path:
    """Write features beside the records they belong to."""
    path = Path(str(shard_path(folder, features.label)).removesuffix(".rank0.jsonl") + FEATURES_SUFFIX)
    arrays = {name: np.ascontiguousarray(getattr(features, name)) for name in _ARRAYS}
    write_atomically(path, save(arrays, {"menet": json.dumps({"label": features.label})}))
    return path


def load_features(path: str | os.PathLike[str]) -> Features:
    """The features that `save_features` wrote."""
    try:
        with safe_open(path, "np") as file:
            label = json.loads(file.metadata()["menet"])["label"]
            found = Features(str(label), *(file.get_tensor(name) for name in _ARRAYS))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"expected features in {path}: {' '.join(str(error).split())}") from error
    if not (found.labels.ndim == 1 and found.clean.shape == found.adversarial.shape and found.clean.ndim == 2):
        raise RecordError(
            f"expected features of one shape in {path}, got {found.clean.shape} and {found.adversarial.shape}"
        )
    return found
