"""What can go wrong in a way the user can mend."""

import importlib
from typing import Any


class MenetError(Exception):
    """An error whose message is one sentence for the user; the command line prints it and exits with 2."""


class DataError(MenetError):
    """A dataset, image file or download that is absent, damaged or not what it claims to be."""


class CheckpointError(MenetError):
    """Weights or a checkpoint that cannot be read, or belong to something else."""


class ConfigurationError(MenetError, ValueError):
    """A setting that cannot work; the message names the field, its value and what is accepted."""


class AttackError(MenetError):
    """An attack that cannot go on; the message names the example."""


class TrainingError(MenetError):
    """Training that cannot go on; the message says at which epoch and step."""


class RecordError(MenetError):
    """A record file that is damaged or belongs to another evaluation."""


def require(module: str, extra: str) -> Any:
    """Import a package that only some installations have; without it, say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"this needs {package}; install it with: pip install 'menet[{extra}]'"
        ) from error
