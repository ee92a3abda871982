"""Checkpoints and weights of a run: written atomically, verified when read, rebuilt into a model by their header.

`last.safetensors` is a checkpoint, all that a run needs to resume: weights, averaged weights, the state of the
optimizer and of every generator, progress, configuration, versions. `best.safetensors` holds the weights of the
best epoch alone, averaged if the run averages.
Both carry a digest of their content. A file may come from a stranger: reading one runs no code, and its sizes are
compared with its tensors before anything is allocated.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from menet.errors import CheckpointError, ConfigurationError, TrainingError
from menet.models import construct, outline, weights
from menet.models.weights import DIGEST, architecture_in, load_verified, with_digest
from menet.preprocessed import Preprocessed, classifier_channels, describe, rebuild
from menet.training.config import TrainingConfig

LAST, BEST = "last.safetensors", "best.safetensors"
FIT = "fit.pt"
"""The state of a defense's own training, in the folder until the run has ended."""

LARGEST_SETTING = 1e9
"""Of any number among a defense's settings in a file; beyond it a number is a mistake or an attack."""
LONGEST_SETTING = 1_000
"""Of any text, list or object among them."""

_UNFIT = (CheckpointError, ConfigurationError, TypeError, ValueError, RuntimeError, LookupError, AttributeError,
          ArithmeticError)  # fmt: skip
"""What building a model from a header that lies, or loading tensors that do not fit it, raises."""


@dataclass
class Progress:
    """How far a run is: `step` steps of `epoch` (from 0) are done, with their running sums."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    correct: int = 0
    seen: int = 0
    best: float | None = None
    """The highest validation score of an epoch so far."""
    robust: float | None = None
    """The highest robust accuracy in a check for catastrophic overfitting so far."""
    fallbacks: int = 0
    """How often the run fell back to its last good weights."""

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.step, self.loss, self.correct, self.seen = self.epoch + 1, 0, 0.0, 0, 0


@dataclass(frozen=True)
class TrainState:
    """Everything that changes as a run proceeds; a checkpoint is this and the configuration."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generators: Mapping[str, torch.Generator]
    """The loop's own and, under `model`, the defense's."""
    progress: Progress = field(default_factory=Progress)
    averaged: nn.Module | None = None
    """The model with the moving average of its weights, where the run averages them."""
    good: dict[str, Tensor] = field(default_factory=dict)
    """The weights of `judged` at the last check for catastrophic overfitting that the run passed."""

    @property
    def judged(self) -> nn.Module:
        """The model that is validated, saved and tested: the averaged one if there is one."""
        return self.model if self.averaged is None else self.averaged


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of this run that was read and verified, not yet loaded."""

    path: Path
    tensors: Mapping[str, Tensor]
    header: Mapping[str, Any]

    @property
    def defense(self) -> dict[str, Any] | None:
        """The settings of the defense as fitted when the run began; None without a defense."""
        return self.header.get("defense") or None

    def restore(self, state: TrainState) -> None:
        """Load everything into `state`."""
        try:
            _restore(state, self.tensors, self.header["progress"])
        except _UNFIT as error:
            raise CheckpointError(f"{self.path} does not fit this run: {_one_line(error)}") from error


def save_checkpoint(path: Path, config: TrainingConfig, state: TrainState) -> None:
    """Write a checkpoint atomically; refuse weights that are not finite."""
    progress = state.progress
    where = f"epoch {progress.epoch + 1}, step {progress.step}"
    tensors = {f"model.{name}": value for name, value in _finite_weights(state.model, where).items()}
    if state.averaged is not None:
        averaged = _finite_weights(state.averaged, where)
        tensors.update({f"averaged.{name}": value for name, value in averaged.items()})
    tensors.update({f"good.{name}": value for name, value in state.good.items()})
    for key, values in state.optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if value is not None:
                tensors[f"optimizer.{key}.{name}"] = value
    for name, generator in state.generators.items():
        tensors[f"generator.{name}"] = generator.get_state()
    save_with_digest(path, tensors, {**_header(config, state.model), "progress": asdict(progress)})


def save_weights(path: Path, config: TrainingConfig, model: nn.Module, scores: Mapping[str, Any]) -> None:
    """Write the model alone, with its validation scores; refuse weights that are not finite."""
    tensors = _finite_weights(model, f"the end of epoch {scores['epoch']}")
    save_with_digest(path, tensors, {**_header(config, model), "scores": dict(scores)})


def read_checkpoint(path: Path, config: TrainingConfig) -> Checkpoint:
    """Read and verify a checkpoint; refuse one of another configuration."""
    tensors, header = load_verified(path)
    if DIGEST not in header:
        raise CheckpointError(f"{path} has no digest, so this version did not write it; choose another folder")
    saved = header.get("training")
    difference = config.difference(saved if isinstance(saved, dict) else {})
    if difference:
        raise CheckpointError(
            f"{path} belongs to another run: {difference}; use the same settings, or choose another folder"
        )
    try:
        _check_fit(header, model_tensors(tensors))
        name, expected = header.get("defense", {}).get("name"), config.defense.get("name")
        if name != expected:
            raise CheckpointError(f"expected the defense {expected!r}, got {name!r:.80}")
    except _UNFIT as error:
        raise CheckpointError(f"{path} does not fit this run: {_one_line(error)}") from error
    return Checkpoint(path, tensors, header)


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """The network and its defense from a run folder or weights file, in evaluation mode on the CPU.

    From a run folder it is the model of the best epoch; from a checkpoint the averaged one, if it has one. The
    file alone is enough: its header says which network and which defense it holds. Reading runs no code from the
    file. A random defense is seeded afresh by the operating system: models loaded from one file do not replay
    each other's draws.
    """
    file = weights_file(Path(path))
    tensors, header = load_verified(file)
    state = model_tensors(tensors, "averaged") or model_tensors(tensors)
    try:
        state = weights.unpack(state, _outline(header).state_dict())
        _check_fit(header, state)
        network = construct(architecture_in(header), torch.Generator())
        model = rebuild(network, header.get("defense", {}), seed=None)
        _fill(model, state)
    except _UNFIT as error:
        if "architecture" not in header:
            raise CheckpointError(
                f"{file} holds the weights of a network whose code is yours: build it behind its defense and "
                "call `model.load(path)`, in Python or in a package.module:factory"
            ) from error
        own = str(error).startswith(("unknown estimator", "unknown defense", "cannot build the estimator"))
        remedy = "; if it is your own, import its module first: menet --import MODULE …" if own else ""
        raise CheckpointError(f"cannot load {file}: {_one_line(error)}{remedy}") from error
    return model.eval()


def load_weights(path: Path, model: nn.Module) -> dict[str, Any]:
    """Fill `model` with the weights at `path`; return their scores."""
    tensors, header = load_verified(path)
    try:
        _fill(model, model_tensors(tensors))
        return dict(header["scores"])
    except _UNFIT as error:
        raise CheckpointError(f"{path} does not fit this run: {_one_line(error)}") from error


def weights_file(path: Path) -> Path:
    """The file to load for a run folder or a file."""
    if not path.is_dir():
        return path
    for name in (BEST, LAST):
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"expected a run folder with {BEST} or {LAST}, got {path}")


def save_with_digest(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and header atomically, with the digest of both in the header."""
    try:
        weights.save(path, tensors, with_digest(tensors, header))
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error.strerror}); the previous file is kept") from error


def model_tensors(tensors: Mapping[str, Tensor], kind: str = "model") -> dict[str, Tensor]:
    """The model's own tensors, of a checkpoint or of a file of weights; of another `kind`, those or none."""
    prefix = f"{kind}."
    inner = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return inner if inner or kind != "model" else dict(tensors)


def _check_fit(header: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Raise unless `state` is that of the model which `header` describes; allocate nothing on its word."""
    _check_same_tensors(_outline(header), state)


def _outline(header: Mapping[str, Any]) -> nn.Module:
    """The model that `header` describes, on the meta device: a header of a few bytes can ask for gigabytes, so
    its sizes are bounded and nothing is allocated yet."""
    architecture = architecture_in(header)
    defense = header.get("defense", {})
    if not isinstance(defense, dict):
        raise CheckpointError(f"expected an object as defense, got {defense!r:.80}")
    _check_sizes("defense", defense)
    network = outline(architecture)
    with torch.device("meta"):
        model = rebuild(network, defense, seed=None)
    codes = classifier_channels(1, defense)
    if architecture.channels % codes:
        raise CheckpointError(f"expected a multiple of {codes} channels, got {architecture.channels}")
    return model


def _check_sizes(name: str, value: Any) -> None:
    """Refuse settings so large that building the defense, or reading them, could exhaust memory."""
    if isinstance(value, dict | list | str) and len(value) > LONGEST_SETTING:
        raise CheckpointError(f"expected at most {LONGEST_SETTING} entries in {name:.80}, got {len(value)}")
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else ((name, one) for one in value)
        for key, one in inner:
            _check_sizes(str(key), one)
    if isinstance(value, int | float) and not abs(value) <= LARGEST_SETTING:
        raise CheckpointError(f"expected {name:.80} <= {LARGEST_SETTING:g}, got {value!r:.80}")


def _check_same_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    found = weights.difference(model.state_dict(), state)
    if found:
        raise CheckpointError(f"the tensors do not fit the model: {found}")


def _fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    _check_same_tensors(model, state)
    model.load_state_dict(state)


def _restore(state: TrainState, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    _fill(state.model, model_tensors(tensors))
    if state.averaged is not None:
        _fill(state.averaged, model_tensors(tensors, "averaged"))
    good = model_tensors(tensors, "good")
    if good:
        _check_same_tensors(state.model, good)
        state.good.update(good)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            key, _, part = rest.partition(".")
            moments.setdefault(int(key), {})[part] = value
    groups = state.optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    for number, parts in moments.items():
        for part, value in parts.items():
            if value.ndim and value.shape != parameters[number].shape:
                raise ValueError(f"the optimizer's {part} of weight {number} has shape {tuple(value.shape)}")
    state.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    for name, generator in state.generators.items():
        generator.set_state(tensors[f"generator.{name}"])
    for one in fields(Progress):
        value = progress[one.name]
        expected = int if one.type is int else float | None if one.name in ("best", "robust") else int | float
        if isinstance(value, bool) or not isinstance(value, expected) or (value is not None and not value >= 0):
            raise ValueError(f"expected progress.{one.name} >= 0, got {value!r:.40}")
        setattr(state.progress, one.name, value)


def _finite_weights(model: nn.Module, where: str) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise TrainingError(
                f"{name} is not finite at {where}; the last good checkpoint is kept (try a lower learning rate)"
            )
    return tensors


def _header(config: TrainingConfig, model: nn.Module) -> dict[str, Any]:
    network = model.classifier if isinstance(model, Preprocessed) else model
    return {
        "architecture": weights.describe(network),  # type: ignore[arg-type]
        "defense": describe(model),
        "dataset": config.dataset,
        "training": config.as_dict(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
