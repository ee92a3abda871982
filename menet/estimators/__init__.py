"""Matrix estimators: batched and differentiable, each a function and a frozen dataclass of its parameters."""

from menet.estimators.base import ESTIMATORS, Estimator, MaskOnly, build, mask_only, name_of, register
from menet.estimators.nuclear_norm import NuclearNorm, nuclear_norm
from menet.estimators.soft_impute import SoftImpute, soft_impute
from menet.estimators.solver import ConvergenceWarning, Solution
from menet.estimators.tubal import TubalNuclearNorm, tubal_nuclear_norm
from menet.estimators.usvt import USVT, usvt

__all__ = [
    "ESTIMATORS",
    "USVT",
    "ConvergenceWarning",
    "Estimator",
    "MaskOnly",
    "NuclearNorm",
    "SoftImpute",
    "Solution",
    "TubalNuclearNorm",
    "build",
    "mask_only",
    "name_of",
    "nuclear_norm",
    "register",
    "soft_impute",
    "tubal_nuclear_norm",
    "usvt",
]
