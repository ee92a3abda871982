"""What commands work on, as users name it: a model and a dataset."""

import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from menet import data
from menet.errors import ConfigurationError
from menet.evaluation.attack_words import number_or_word

PAPER_EPSILON = {"digits": 0.3, "mnist": 0.3}


def model_of(name: str) -> tuple[nn.Module, str]:
    """The model that `name` names, in evaluation mode, and where it came from.

    A run folder or weights file, or `package.module:factory` with a function of no arguments that returns an
    `nn.Module`; it is imported with the current folder in reach.
    """
    if Path(name).exists():
        from menet.training import load_model

        return load_model(Path(name)).eval(), name
    module, sign, attribute = name.partition(":")
    if not sign or not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise ConfigurationError(f"{name!r} is no run folder, no weights file and no package.module:factory")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{name!r} cannot be imported: {error}") from error
    model = found if isinstance(found, nn.Module) else _call(name, found)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{name!r} gave a {type(model).__name__}; accepted is a torch.nn.Module")
    return model.eval(), name


def _call(name: str, factory: Any) -> Any:
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name!r} cannot be called without arguments: {error}") from error
    return factory()


def dataset_of(
    name: str | None, run: str, split: str, root: Path | None = None, side: int | None = None
) -> data.Dataset:
    """The dataset that `name` names: one of the known ones or a folder; by default that of the run."""
    if name is None:
        name = _dataset_of_run(Path(run))
    if name.partition(":")[0] not in data.NAMES and Path(name).is_dir():
        name = f"folder:{name}"
    return data.load(name, split, root, side=side)


def _dataset_of_run(run: Path) -> str:
    folder = run if run.is_dir() else run.parent
    config = folder / "config.json"
    if config.is_file():
        try:
            found = json.loads(config.read_text()).get("dataset")
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(f"{config} is not a JSON object; name the dataset with --data") from error
        if isinstance(found, dict):
            found = found.get("name")
        if isinstance(found, str):
            return found
    raise ConfigurationError(f"{run} does not say what it was trained on; name the dataset with --data")


def device_of(name: str) -> torch.device:
    """The device of that name; `cuda` alone is each process's own under torchrun."""
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device is {name!r}; accepted are cpu, cuda, cuda:0, …") from error


def epsilon_of(text: str | None, dataset: str) -> float:
    """`text` as a number (8/255 is one), or the paper's choice for the dataset."""
    if text is None:
        return PAPER_EPSILON.get(dataset, 8 / 255)
    value = number_or_word(text)
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigurationError(f"epsilon is {text!r}; accepted are numbers from 0, such as 0.3 or 8/255")
    return float(value)


def default_folder(run: str, name: str) -> Path:
    """Where a command puts what it makes of a model: beside a run, or under `runs` for a factory."""
    path = Path(run)
    if path.exists():
        return (path if path.is_dir() else path.parent) / name
    return Path("runs") / run.replace(":", ".") / name
