"""Matrix estimation as a defense for image classifiers (ME-Net), and honest measurements of it."""

from menet import baselines
from menet.defense import FixedMasks, MENet
from menet.estimators import (
    USVT,
    NuclearNorm,
    SoftImpute,
    Tensor,
    nuclear_norm,
    soft_impute,
    tensor,
    usvt,
)

__version__ = "0.1.0"

__all__ = [
    "USVT",
    "FixedMasks",
    "MENet",
    "NuclearNorm",
    "SoftImpute",
    "Tensor",
    "__version__",
    "baselines",
    "nuclear_norm",
    "soft_impute",
    "tensor",
    "usvt",
]
