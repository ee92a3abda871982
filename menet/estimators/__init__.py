"""Matrix estimators: batched and differentiable, each a function and a frozen dataclass of its parameters."""

from menet.estimators.base import ESTIMATORS, Estimator, MaskOnly, build, mask_only, name_of, register
from menet.estimators.constrained import Constrained, constrained
from menet.estimators.factored import factored
from menet.estimators.large import Completion, complete
from menet.estimators.nuclear_norm import (
    NuclearNorm,
    TubalNuclearNorm,
    nuclear_norm,
    tubal_nuclear_norm,
)
from menet.estimators.path import (
    CrossValidation,
    Path,
    cross_validate,
    cross_validate_large,
    path,
    path_large,
)
from menet.estimators.soft_impute import SoftImpute, soft_impute
from menet.estimators.solver import ConvergenceWarning, Solution
from menet.estimators.usvt import USVT, usvt

__all__ = [
    "ESTIMATORS",
    "USVT",
    "Completion",
    "Constrained",
    "ConvergenceWarning",
    "CrossValidation",
    "Estimator",
    "MaskOnly",
    "NuclearNorm",
    "Path",
    "SoftImpute",
    "Solution",
    "TubalNuclearNorm",
    "build",
    "complete",
    "constrained",
    "cross_validate",
    "cross_validate_large",
    "factored",
    "mask_only",
    "name_of",
    "nuclear_norm",
    "path",
    "path_large",
    "register",
    "soft_impute",
    "tubal_nuclear_norm",
    "usvt",
]
