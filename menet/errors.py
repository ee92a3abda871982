"""Errors that the user can fix; each message is one sentence that says how."""

import importlib
from typing import Any


class MenetError(Exception):
    """Base of all errors of this package; the command line prints the message and exits with code 2."""


class DataError(MenetError):
    """A dataset, image file or download that is missing, damaged or of the wrong kind."""


class CheckpointError(MenetError):
    """Weights or a checkpoint that cannot be read or belong to another model or run."""


class ConfigurationError(MenetError, ValueError):
    """An invalid setting: `expected epsilon >= 0, got -1`, or an unknown name with the choices."""


class AttackError(MenetError):
    """An attack that cannot continue; the message names the example."""


class NotDifferentiable(AttackError):
    """A model whose logits carry no gradient to its images: attack it without gradients."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not differentiable with respect to its images; "
            "use an attack without gradients (spsa, square, boundary)"
        )


class TrainingError(MenetError):
    """Training that cannot continue; the message says at which epoch and step."""


class RecordError(MenetError):
    """Records that are damaged or belong to another evaluation."""


def require(module: str, extra: str) -> Any:
    """Import and return an optional package; if it is missing, the error names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"this needs {package}; install it with: pip install 'menet[{extra}]'"
        ) from error
