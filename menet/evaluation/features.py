"""Penultimate features of the images that an evaluation kept as snapshots (t-SNE, class distances)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import nn

from menet import seeding
from menet.errors import RecordError
from menet.evaluation import provenance
from menet.evaluation.records import Records, shard_path
from menet.evaluation.scoring import evaluation_mode
from menet.evaluation.snapshots import unpack
from menet.files import write_atomically
from menet.seeding import reseed

SUFFIX = ".features.safetensors"
_ARRAYS = ("labels", "clean", "adversarial")


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
        raise RecordError(f"expected snapshots in the records of {records.label!r}, got none; evaluate with some")
    if not hasattr(model, "features"):
        raise RecordError(f"expected a model with a method `features`, got a {type(model).__name__}")
    if provenance.weights_hash(model) != records.evaluation["model"]["weights"]:
        raise RecordError(f"the records of {records.label!r} are of another model")
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
    path = Path(str(shard_path(folder, features.label)).removesuffix(".rank0.jsonl") + SUFFIX)
    arrays = {name: np.ascontiguousarray(getattr(features, name)) for name in _ARRAYS}
    write_atomically(path, save(arrays, {"menet": json.dumps({"label": features.label})}))
    return path


def load_features(path: str | os.PathLike[str]) -> Features:
    """The features that `save_features` wrote."""
    try:
        with safe_open(path, "np") as file:
            label = json.loads(file.metadata()["menet"])["label"]
            found = Features(str(label), *(file.get_tensor(name) for name in _ARRAYS))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} does not hold features: {' '.join(str(error).split())}") from error
    if not (found.labels.ndim == 1 and found.clean.shape == found.adversarial.shape and found.clean.ndim == 2):
        raise RecordError(f"{path} holds features whose shapes do not match")
    return found
