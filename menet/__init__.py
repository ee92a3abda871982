"""ME-Net: matrix estimation as a defense for image classifiers, and an honest evaluation of it.

    model = menet.MENet(classifier, "nuclear-norm", p=(0.4, 0.6)).eval()
    labels = model.vote(images, draws=10)

Names are imported on first use, so that `import menet` does not import torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torch import nn

    from menet import attacks, baselines, data, estimators, images, masks, models
    from menet.attacks import Attack, ThreatModel
    from menet.defense import FixedMasks, MENet
    from menet.errors import (
        AttackError,
        CheckpointError,
        ConfigurationError,
        DataError,
        MenetError,
        RecordError,
        TrainingError,
    )
    from menet.estimators.base import Estimator, MaskOnly, mask_only
    from menet.estimators.nuclear_norm import NuclearNorm, nuclear_norm
    from menet.estimators.soft_impute import SoftImpute, soft_impute
    from menet.estimators.tubal import TubalNuclearNorm, tubal_nuclear_norm
    from menet.estimators.usvt import USVT, usvt
    from menet.evaluation.audit import audit
    from menet.evaluation.certify import certify
    from menet.evaluation.runner import evaluate
    from menet.preprocessed import Preprocessed
    from menet.training import train

_MODULES = ("attacks", "baselines", "data", "estimators", "images", "masks", "models")
_NAMES = {
    "attacks": "Attack ThreatModel",
    "defense": "FixedMasks MENet",
    "errors": "AttackError CheckpointError ConfigurationError DataError MenetError RecordError TrainingError",
    "estimators": "USVT Estimator MaskOnly NuclearNorm SoftImpute TubalNuclearNorm "
    "mask_only nuclear_norm soft_impute tubal_nuclear_norm usvt",
    "evaluation": "audit certify evaluate",
    "preprocessed": "Preprocessed",
    "training": "train",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "USVT",
    "Attack",
    "AttackError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "Estimator",
    "FixedMasks",
    "MENet",
    "MaskOnly",
    "MenetError",
    "NuclearNorm",
    "Preprocessed",
    "RecordError",
    "SoftImpute",
    "ThreatModel",
    "TrainingError",
    "TubalNuclearNorm",
    "__version__",
    "attacks",
    "audit",
    "baselines",
    "certify",
    "data",
    "estimators",
    "evaluate",
    "images",
    "load",
    "mask_only",
    "masks",
    "models",
    "nuclear_norm",
    "soft_impute",
    "train",
    "tubal_nuclear_norm",
    "usvt",
]


def load(run: "str | os.PathLike[str]") -> "nn.Module":
    """The model of a run folder or checkpoint file, in evaluation mode on the CPU.

    `run` is a path, the name of a folder under `runs/`, or that of a network that comes with the package
    (`menet models list`). Of a run folder it is the best epoch. A random
    defense is seeded afresh at each load; call its `reseed` to reproduce draws. Loading runs no code from the
    file.
    """
    training = importlib.import_module("menet.training")
    pretrained = importlib.import_module("menet.training.pretrained")
    model: nn.Module = training.load_model(pretrained.locate(run))
    return model


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"menet.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"menet.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'menet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
