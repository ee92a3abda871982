"""A trained model from a run folder or a weights file, by what the file says about itself."""

import os
from pathlib import Path

import torch
from torch import nn

from menet.errors import CheckpointError, ConfigurationError
from menet.models import weights
from menet.preprocessed import rebuild
from menet.training.checkpoint import BEST, LAST, model_tensors


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """The network and its defense from a run folder or a file of it, in evaluation mode on the CPU.

    Of a run folder it is the best epoch. Nothing but the file is needed: its header says which network and which
    defense it holds. Reading runs no code from the file.
    """
    file = weights_file(Path(path))
    tensors, header = weights.load(file)
    state = model_tensors(tensors)
    try:
        network = weights.rebuild(header, torch.Generator())
        defense = header.get("defense", {})
        if not isinstance(defense, dict):
            raise CheckpointError(f"the header has the defense {defense!r:.80}, not an object")
        model = rebuild(network, defense)
        model.load_state_dict(state)
    except (CheckpointError, ConfigurationError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} cannot be loaded: {reason}") from error
    return model.eval()


def weights_file(path: Path) -> Path:
    """The file to load for a run folder or a file."""
    if not path.is_dir():
        return path
    for name in (BEST, LAST):
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} is no run folder: it holds neither {BEST} nor {LAST}")
