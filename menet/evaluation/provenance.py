"""Where rows come from: the model, dataset, attack and machine, in plain JSON values for a header."""

import dataclasses
import hashlib
import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from menet.models import Network
from menet.models.weights import describe as describe_network
from menet.preprocessed import Preprocessed, describe

PACKAGES = ("menet", "torch", "numpy", "scipy", "foolbox", "pyautoattack")


def of_model(model: Any) -> dict[str, Any]:
    """The model: its network, its defense, and a hash of its weights."""
    network = model.classifier if isinstance(model, Preprocessed) else model
    return {
        "kind": type(model).__name__,
        "architecture": describe_network(network) if isinstance(network, Network) else type(network).__name__,
        "defense": plain(describe(model)) if isinstance(model, nn.Module) else {},
        "weights": weights_hash(model) if isinstance(model, nn.Module) else None,
    }


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        # The forward pass uses them as they are, so their bytes are what the rows depend on.
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def of_dataset(dataset: Any) -> dict[str, Any]:
    """The split of a dataset that examples are indices of."""
    return {
        "name": dataset.name,
        "split": dataset.split,
        "examples": len(dataset),
        "shape": list(dataset.images.shape[1:]),
        "classes": len(dataset.classes),
        "class_names": list(dataset.classes),
    }


def of_image(image: Tensor) -> str:
    """A digest of one image, by which rows of the same example are recognized."""
    return hashlib.sha256(image.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def of_attack(attack: Any) -> dict[str, Any]:
    """An attack by its class and all its settings."""
    settings = plain(attack)
    return settings if isinstance(settings, dict) else {"kind": type(attack).__name__}


def of_machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions and hardware, which may change between the sessions of one evaluation."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: dataclasses by class and fields, models by a hash, functions by name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, nn.Module):
        return of_model(value)
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__name__)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
