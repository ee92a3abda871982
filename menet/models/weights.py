"""Weights in safetensors files that say what they are.

The header is a JSON object in the file's metadata: `architecture`, the `version` of menet, and whatever the
caller adds, by custom `dataset`, `defense` and `training`. Reading never unpickles, so a file from a stranger
can be wrong but cannot run code.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import menet
from menet.errors import CheckpointError, ConfigurationError
from menet.files import replacing
from menet.models.header import architecture_in, describe, rebuild
from menet.models.network import Network
from menet.models.registry import construct, outline

__all__ = ["describe", "load", "load_into", "rebuild", "restore", "save"]

KEY = "menet"
PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin")

Location = str | os.PathLike[str]


def save(path: Location, module: nn.Module | Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write weights and header to `path`, wholly or not at all.

    The version is added to the header, and for a network made by `build` its architecture, unless they are
    there already. Tensors that share memory are written once for each name.
    """
    full = {"version": menet.__version__, **header}
    if isinstance(module, Network):
        full.setdefault("architecture", describe(module))
    try:
        text = json.dumps(full, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the header cannot be written as JSON: {error}") from error
    tensors = {}
    for name, value in (module.state_dict() if isinstance(module, nn.Module) else module).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name!r} is a {type(value).__name__}; only tensors can be saved")
        # safetensors refuses tensors that share memory or are not contiguous; a copy is neither.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={KEY: text})


def load(path: Location) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, on the CPU and independent of the file, and its header."""
    path = Path(path)
    _refuse_other_formats(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        # All but the first: kinds of numbers that the format knows and this torch does not, sizes beyond it.
        raise CheckpointError(f"{path} is damaged or cut short: {_one_line(error)}") from error
    if KEY not in metadata:
        raise CheckpointError(f"{path} holds tensors but no {KEY!r} header, so menet did not save it")
    try:
        header = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that is not JSON: {_one_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object")
    return state, header


def load_into(module: nn.Module, path: Location) -> dict[str, Any]:
    """Fill `module` with the weights at `path` and return the header.

    Every name and shape must agree; where one does not, the error says how the file differs, and `module` is
    left as it was.
    """
    state, header = load(path)
    difference = _difference(module, state, header)
    if difference:
        raise CheckpointError(f"{path} does not fit the network: {difference}")
    module.load_state_dict(state)
    return header


def restore(path: Location) -> tuple[Network, dict[str, Any]]:
    """The network stored at `path`, built from its header alone and filled, and the header.

    It comes in training mode, like any new network.
    """
    state, header = load(path)
    try:
        architecture = architecture_in(header)
        # Compared before anything is allocated: a header can ask for far more than its file holds.
        difference = _difference(outline(architecture), state, header)
    except (CheckpointError, ConfigurationError) as error:
        raise CheckpointError(f"{path} cannot be restored: {error}") from error
    if difference:
        raise CheckpointError(f"{path} does not fit its own header: {difference}")
    network = construct(architecture, torch.Generator())
    network.load_state_dict(state)
    return network, header


def _refuse_other_formats(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if start[8:] == b"{":
        return
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80" or path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} is a pickle or torch.save file; reading one can run code that it carries, so menet "
            "loads safetensors files only"
        )
    raise CheckpointError(f"{path} is not a safetensors file")


def _difference(module: nn.Module, state: Mapping[str, Tensor], header: Mapping[str, Any]) -> str | None:
    """How the state of a file differs from what `module` takes, in a few words; None where it fits."""
    stored = header.get("architecture")
    if isinstance(module, Network) and isinstance(stored, Mapping):
        # Not the side, which most networks are free in, nor the normalisation, which comes with the weights.
        for field in ("name", "channels", "classes"):
            mine, theirs = getattr(module.architecture, field), stored.get(field)
            if mine != theirs:
                return f"its architecture has {field} = {theirs!r:.80}, the network is {module.architecture}"
    expected = module.state_dict()
    missing, surplus = expected.keys() - state.keys(), state.keys() - expected.keys()
    if missing or surplus:
        kind, names = ("lacks", missing) if missing else ("has the unknown", surplus)
        return f"it {kind} {min(names)!r:.120}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            return f"{name!r} is {_size(state[name])} there and {_size(tensor)} in the network"
        if tensor.is_floating_point() != state[name].is_floating_point():
            return f"{name!r} is {state[name].dtype} there and {tensor.dtype} in the network"
    return None


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a single number"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
