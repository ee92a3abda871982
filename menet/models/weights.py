"""Weights in safetensors files that say what they are.

The header is a JSON object in the file's metadata: `architecture`, the `version` of menet, and what the
caller adds, by convention `dataset`, `defense` and `training`. Reading never unpickles, so a file from a
stranger can be wrong but cannot run code.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import menet
from menet.errors import CheckpointError
from menet.files import replacing
from menet.models.networks import Architecture, Network

KEY = "menet"
DIGEST = "digest"
LEFT, RIGHT = ".left", ".right"
"""Ends of the names of the two factors of a matrix."""
LEVELS, SCALE = ".levels", ".scale"
"""Ends of the names of a kernel's 8-bit integers and of the step between two of them, per output channel."""
LARGE_KERNEL = 2**17
"""Weights of a convolution from which it is packed in 8 bits."""
PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin")

Location = str | os.PathLike[str]


def save(path: Location, module: nn.Module | Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write weights and header to `path`, wholly or not at all.

    The version is added to the header, and for a network made by `build` its architecture, unless already
    there. Tensors that share memory are written once per name.
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
            raise CheckpointError(f"expected tensors only, got {name!r} as {type(value).__name__}")
        # safetensors refuses tensors that share memory or are not contiguous; a copy is neither.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={KEY: text})
    except SafetensorError as error:
        # A full disk, among others, is no OSError there.
        raise CheckpointError(f"cannot write {path} ({_one_line(error)}); the previous file is kept") from error


def load(path: Location) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, on the CPU and independent of the file, and its header."""
    path = Path(path)
    _refuse_other_formats(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        # All but the first come from number formats that torch does not know, and from sizes beyond it.
        raise CheckpointError(f"{path} is damaged or truncated: {_one_line(error)}") from error
    if KEY not in metadata:
        raise CheckpointError(f"{path} has no {KEY!r} header; expected a file saved by menet")
    try:
        header = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that is not JSON: {_one_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object")
    return state, header


def pack(state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A state in fewer bytes: half precision, matrices that then take less as two factors of rank `rank`, and
    large convolutions as 8-bit integers with a scale per output channel.

    The factors are those of the best approximation of that rank. What this costs in accuracy has to be measured.
    """
    packed = {}
    for name, value in state.items():
        value = value.detach().cpu()
        if not value.is_floating_point():
            packed[name] = value
        elif value.ndim == 2 and rank * sum(value.shape) < value.numel():
            left, scales, right = torch.linalg.svd(value.double(), full_matrices=False)
            roots = scales[:rank].sqrt()
            packed[name + LEFT] = (left[:, :rank] * roots).half()
            packed[name + RIGHT] = (roots[:, None] * right[:rank]).half()
        elif value.ndim == 4 and value.numel() >= LARGE_KERNEL:
            scale = value.abs().amax((1, 2, 3)) / 127
            steps = value / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None, None, None]
            if not bool(steps.isfinite().all()):
                raise CheckpointError(f"{name} has weights that are not finite; save these weights unpacked")
            packed[name + LEVELS], packed[name + SCALE] = steps.round().to(torch.int8), scale.float()
        else:
            packed[name] = value.half()
    for name, value in packed.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{name} does not fit half precision; save these weights unpacked")
    return packed


def unpack(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state as it was before `pack`, but for rounding; one that was never packed comes back as it is.

    Factors are multiplied only where their product has the shape of the tensor in `expected`: those of a few
    bytes can have a product of gigabytes.
    """
    whole = dict(state)
    for name, tensor in expected.items():
        if name not in whole and name + LEFT in whole and name + RIGHT in whole:
            left, right = whole.pop(name + LEFT), whole.pop(name + RIGHT)
            if left.ndim != 2 or right.ndim != 2 or (left.shape[0], right.shape[1]) != tuple(tensor.shape):
                raise CheckpointError(
                    f"expected factors of {name!r} of shape {_size(tensor)}, got {_size(left)} and {_size(right)}"
                )
            # In double precision the float32 that comes out hardly depends on the processor.
            whole[name] = (left.double() @ right.double()).to(tensor.dtype)
        elif name not in whole and name + LEVELS in whole and name + SCALE in whole:
            levels, scale = whole.pop(name + LEVELS), whole.pop(name + SCALE)
            if levels.shape != tensor.shape or scale.shape != tensor.shape[:1] or levels.dtype != torch.int8:
                raise CheckpointError(
                    f"expected {name!r} as 8-bit integers of shape {_size(tensor)} and a scale per channel, "
                    f"got {_size(levels)} as {levels.dtype} and {_size(scale)}"
                )
            whole[name] = levels.to(tensor.dtype) * scale.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
        elif name in whole and whole[name].dtype == torch.half:
            whole[name] = whole[name].to(tensor.dtype)
    return whole


def difference(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    """The first difference in names, shapes or kinds of numbers between two states; None where they fit."""
    missing, surplus = expected.keys() - state.keys(), state.keys() - expected.keys()
    if missing or surplus:
        kind, names = ("missing", missing) if missing else ("unknown", surplus)
        return f"{kind} {min(names)!r:.120}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            return f"expected {name!r} of shape {_size(tensor)}, got {_size(state[name])}"
        if tensor.is_floating_point() != state[name].is_floating_point():
            return f"expected {name!r} as {tensor.dtype}, got {state[name].dtype}"
    return None


def with_digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[str, Any]:
    """`header` with the version, and the digest of itself and of the tensors, for `load_verified`."""
    full = {"version": menet.__version__, **header}
    return {**full, DIGEST: content_digest(tensors, full)}


def load_verified(path: Location) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file, refused if either has changed since it was written.

    Files without a digest are those that `save` wrote by itself.
    """
    tensors, header = load(path)
    if DIGEST in header and header[DIGEST] != content_digest(tensors, header):
        raise CheckpointError(
            f"{path} is damaged: its content does not match its digest; restore it from a copy or train again"
        )
    return tensors, header


def content_digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """The SHA-256 of a header and of each tensor's name, dtype, shape and bytes, in the order of names."""
    plain = {name: value for name, value in header.items() if name != DIGEST}
    try:
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not JSON: {_one_line(error)}") from error
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe(module: Network) -> dict[str, Any]:
    """How `module` was built, in plain values: the header's `architecture`."""
    plain = asdict(module.architecture)
    for name in ("mean", "std"):
        buffer = getattr(module.normalize, name).flatten().cpu()
        plain[name] = list(plain[name])
        if not torch.equal(buffer, torch.tensor(plain[name])):
            # Weights loaded since then brought their own normalization; the buffer is what the network uses.
            plain[name] = buffer.tolist()
    return plain


def architecture_in(header: Mapping[str, Any]) -> Architecture:
    """The architecture of a header, which may hold anything: the file may come from a stranger."""
    found = header.get("architecture")
    expected = [field.name for field in fields(Architecture)]
    if not isinstance(found, Mapping) or set(found) != set(expected):
        raise CheckpointError(f"expected a header with an architecture of exactly {', '.join(expected)}")
    return Architecture(
        _of_type(found, "name", str, "a string"),
        _of_type(found, "channels", int, "an integer"),
        _of_type(found, "side", int, "an integer"),
        _of_type(found, "classes", int, "an integer"),
        _numbers(found, "mean"),
        _numbers(found, "std"),
    )


def _of_type(found: Mapping[str, Any], name: str, accepted: type, words: str) -> Any:
    value = found[name]
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise CheckpointError(f"expected {words} for the architecture's {name}, got {value!r:.80}")
    return value


def _numbers(found: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = _of_type(found, name, list, "a list of numbers")
    if not all(isinstance(value, int | float) and abs(value) < 1e30 for value in values):
        raise CheckpointError(f"expected a list of numbers for the architecture's {name}, got {values!r:.80}")
    return tuple(map(float, values))


def _refuse_other_formats(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(f"cannot read {path}: not a regular file")  # opening a pipe would wait forever
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if start[8:] == b"{":
        return
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80" or path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} is a pickle or torch.save file, which can run code when loaded; expected a safetensors file"
        )
    raise CheckpointError(f"{path} is not a safetensors file")


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
