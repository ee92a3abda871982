"""Matrix estimators: batched and differentiable, each a function and a frozen dataclass of its parameters."""

from menet.estimators.base import (
    ESTIMATORS,
    ConvergenceWarning,
    Estimator,
    MaskOnly,
    build,
    mask_only,
    name_of,
    register,
)
from menet.estimators.entries import Completion
from menet.estimators.factored import factored
from menet.estimators.large import complete
from menet.estimators.soft_impute import SoftImpute, soft_impute

# Estimators are listed in the order in which they are imported: Soft-Impute before the nuclear norm.
# isort: split
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
from menet.estimators.solver import Solution
from menet.estimators.splitting import Constrained, constrained
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
