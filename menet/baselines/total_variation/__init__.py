"""Total-variation minimization (Guo, Rana, Cissé & van der Maaten, 2018): solver, gradient and defense."""

from menet.baselines.total_variation.defense import TotalVariation
from menet.baselines.total_variation.solver import objective, total_variation

__all__ = ["TotalVariation", "objective", "total_variation"]
