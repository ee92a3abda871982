"""Checkpoints: everything a run needs to go on as if it had never stopped, in one safetensors file.

Weights, the optimizer's state, every generator's state, how far the run is, its configuration and the versions
that computed it. Files are written beside and renamed, so a reader or the next run never sees half of one.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from menet.errors import CheckpointError, TrainingError
from menet.models import weights
from menet.preprocessed import Preprocessed, describe
from menet.training.config import TrainingConfig

LAST, BEST = "last.safetensors", "best.safetensors"


@dataclass
class Progress:
    """How far a run is: `step` steps of `epoch` are done, with what they summed up to so far."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    correct: int = 0
    seen: int = 0
    best: float | None = None
    """The highest score of an epoch so far."""

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.step, self.loss, self.correct, self.seen = self.epoch + 1, 0, 0.0, 0, 0


@dataclass(frozen=True)
class Moving:
    """The parts of a run that change as it goes on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generators: Mapping[str, torch.Generator]


def save_checkpoint(path: Path, config: TrainingConfig, moving: Moving, progress: Progress) -> None:
    """Write a full checkpoint, wholly or not at all; refuse weights that are not numbers."""
    tensors = {f"model.{name}": value for name, value in moving.model.state_dict().items()}
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise TrainingError(
                f"{name} is no longer finite at epoch {progress.epoch + 1}, step {progress.step}; "
                "the last good checkpoint is kept (a lower rate may help)"
            )
    for key, state in moving.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                tensors[f"optimizer.{key}.{name}"] = value
    for name, generator in moving.generators.items():
        tensors[f"generator.{name}"] = generator.get_state()
    _write(path, tensors, {**_header(config, moving.model), "progress": asdict(progress)})


def save_weights(path: Path, config: TrainingConfig, model: nn.Module, scores: Mapping[str, Any]) -> None:
    """Write the model alone, with what is known of how good it is."""
    _write(path, model.state_dict(), {**_header(config, model), "scores": dict(scores)})


def resume(path: Path, config: TrainingConfig, moving: Moving) -> Progress:
    """Fill `moving` from a checkpoint and return how far it was; refuse one of another configuration."""
    tensors, header = weights.load(path)
    theirs = TrainingConfig.from_dict(header.get("training", {}))
    difference = config.difference(theirs)
    if difference:
        raise CheckpointError(
            f"{path} belongs to another run: {difference}; keep to its settings, or choose another folder"
        )
    try:
        _fill(moving, tensors)
        progress = Progress(**{one.name: header["progress"][one.name] for one in fields(Progress)})
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path} does not fit this run: {reason}") from error
    return progress


def fitted_defense(path: Path, config: TrainingConfig) -> dict[str, Any] | None:
    """The settings of the defense in a checkpoint, if it is the configured one; `resume` names what differs."""
    defense = weights.load(path)[1].get("defense") or {}
    return defense if defense.get("name") == config.defense.get("name") else None


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own tensors, of a full checkpoint or of a file of weights."""
    prefix = "model."
    inner = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return inner or dict(tensors)


def _fill(moving: Moving, tensors: Mapping[str, Tensor]) -> None:
    moving.model.load_state_dict(model_tensors(tensors))
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            key, _, part = rest.partition(".")
            state.setdefault(int(key), {})[part] = value
    groups = moving.optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in moving.optimizer.param_groups for parameter in group["params"]]
    for number, parts in state.items():
        for part, value in parts.items():
            if value.ndim and value.shape != parameters[number].shape:
                raise ValueError(f"the optimizer's {part} of weight {number} has shape {tuple(value.shape)}")
    moving.optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, generator in moving.generators.items():
        generator.set_state(tensors[f"generator.{name}"])


def _header(config: TrainingConfig, model: nn.Module) -> dict[str, Any]:
    network = model.classifier if isinstance(model, Preprocessed) else model
    return {
        "architecture": weights.describe(network),  # type: ignore[arg-type]
        "defense": describe(model),
        "dataset": config.dataset,
        "training": config.as_dict(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    try:
        weights.save(path, tensors, header)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be written ({reason}); what stood there before is kept") from error
