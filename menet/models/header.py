"""The part of a weights file's header that a network can be built from again."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from menet.errors import CheckpointError, ConfigurationError
from menet.models.network import Architecture, Network
from menet.models.registry import construct


def describe(module: Network) -> dict[str, Any]:
    """How `module` was built, in plain values: the header's `architecture`."""
    plain = asdict(module.architecture)
    for name in ("mean", "std"):
        buffer = getattr(module.normalise, name).flatten().cpu()
        plain[name] = list(plain[name])
        if not torch.equal(buffer, torch.tensor(plain[name])):
            # Weights loaded since brought their own normalisation; the buffer is what the network does.
            plain[name] = buffer.tolist()
    return plain


def rebuild(header: Mapping[str, Any], generator: torch.Generator | None = None) -> Network:
    """A network with fresh weights, as the `architecture` of a header describes it."""
    try:
        return construct(architecture_in(header), generator)
    except ConfigurationError as error:
        raise CheckpointError(f"the header's architecture cannot be built: {error}") from error


def architecture_in(header: Mapping[str, Any]) -> Architecture:
    """The architecture of a header, which may hold anything: it may come from a stranger."""
    found = header.get("architecture")
    expected = [field.name for field in fields(Architecture)]
    if not isinstance(found, Mapping) or set(found) != set(expected):
        raise CheckpointError(f"the header has no architecture with just the fields {', '.join(expected)}")
    return Architecture(
        _of_type(found, "name", str, "a text"),
        _of_type(found, "channels", int, "a whole number"),
        _of_type(found, "side", int, "a whole number"),
        _of_type(found, "classes", int, "a whole number"),
        _numbers(found, "mean"),
        _numbers(found, "std"),
    )


def _of_type(found: Mapping[str, Any], name: str, accepted: type, words: str) -> Any:
    value = found[name]
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise CheckpointError(f"the header's architecture has {name} = {value!r:.80}, not {words}")
    return value


def _numbers(found: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = _of_type(found, name, list, "a list of numbers")
    if not all(isinstance(value, int | float) and abs(value) < 1e30 for value in values):
        raise CheckpointError(f"the header's architecture has {name} = {values!r:.80}, not a list of numbers")
    return tuple(map(float, values))
