"""What the tests of training share: one tiny configuration that uses every random stream there is."""

import hashlib
import os
import sys
from pathlib import Path

from menet.training import TrainingConfig
from menet.training.config import me_net

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def tiny(**changes) -> TrainingConfig:
    """Twelve steps in all of a small network behind ME-Net, adversarially, with augmentation and validation."""
    settings = {
        "model": "small",
        "defense": me_net("usvt", (0.4, 0.6)),
        "objective": "adversarial",
        "steps": 2,
        "step_size": 0.1,
        "epochs": 3,
        "batch_size": 16,
        "limit": 64,
        "validation": 32,
        "augmentation": True,
        "learning_rate": 0.05,
    }
    return TrainingConfig(**{**settings, **changes})


def full(**changes) -> TrainingConfig:
    """The same steps with whatever else a run has to remember: averaged and good weights, a rising budget."""
    extra = {
        "objective": "n-fgsm",
        "ema": 0.9,
        "label_smoothing": 0.1,
        "clip_gradient": 1.0,
        "epsilon_warm_up": 0.5,
        "schedule": "cosine",
        "guard": 3,
    }
    return tiny(**{**extra, **changes})


def plain(**changes) -> TrainingConfig:
    """The same steps without attack, defense or augmentation: the quickest real run."""
    return tiny(**{"defense": {}, "objective": "standard", "augmentation": False, **changes})


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
