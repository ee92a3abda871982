"""Attacks: small frozen objects called as `attack(model, images, labels, generator=…) -> AttackResult`.

They see a callable images → logits and nothing of what is behind it. `build(name, epsilon=…)` makes one by
name. To write your own, see `Attack`; to step in another way, `StepRule`.
"""

from menet.attacks.adaptive import ApproximateInput, ClassifierOnly, LowFrequency, OnManifold, ProjectedBPDA
from menet.attacks.ascent import LossOracle, StepRule
from menet.attacks.base import Attack, AttackResult, GradientWarning, Task, is_deterministic
from menet.attacks.decision_based import Boundary, HopSkipJump
from menet.attacks.ensemble import MultiTargeted, Transfer, WorstCase
from menet.attacks.external import CWL2, AutoAttack, AutoAttackRand
from menet.attacks.losses import DLR, CrossEntropy, Margin
from menet.attacks.pgd import APGD, CW, FGSM, PGD
from menet.attacks.registry import ATTACKS, NAMES, TITLES, build, split_name
from menet.attacks.score_based import SPSA, RandomSearch, Square
from menet.attacks.standard import Standard
from menet.attacks.threat import ThreatModel

__all__ = [
    "APGD",
    "ATTACKS",
    "CW",
    "CWL2",
    "DLR",
    "FGSM",
    "NAMES",
    "PGD",
    "SPSA",
    "TITLES",
    "ApproximateInput",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "AutoAttackRand",
    "Boundary",
    "ClassifierOnly",
    "CrossEntropy",
    "GradientWarning",
    "HopSkipJump",
    "LossOracle",
    "LowFrequency",
    "Margin",
    "MultiTargeted",
    "OnManifold",
    "ProjectedBPDA",
    "RandomSearch",
    "Square",
    "Standard",
    "StepRule",
    "Task",
    "ThreatModel",
    "Transfer",
    "WorstCase",
    "build",
    "is_deterministic",
    "split_name",
]
