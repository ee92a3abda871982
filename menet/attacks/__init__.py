"""Attacks: small frozen objects called as `attack(model, images, labels, generator=…) -> AttackResult`.

They see a callable images → logits and nothing of what is behind it. `build(name, epsilon=…)` makes one by
name. To write your own, see `Attack`; to step in another way, `StepRule`.
"""

from menet.attacks.adaptive import ApproximateInput, ClassifierOnly, LowFrequency, ProjectedBPDA
from menet.attacks.apgd import APGD
from menet.attacks.ascent import LossOracle, StepRule
from menet.attacks.autoattack import AutoAttack, AutoAttackRand
from menet.attacks.base import Attack, AttackResult, GradientWarning, Task, is_deterministic
from menet.attacks.cw_l2 import CWL2
from menet.attacks.decision_based import Boundary, HopSkipJump
from menet.attacks.ensemble import MultiTargeted, WorstCase
from menet.attacks.losses import DLR, CrossEntropy, Margin
from menet.attacks.on_manifold import OnManifold
from menet.attacks.pgd import CW, FGSM, PGD
from menet.attacks.random_search import RandomSearch
from menet.attacks.registry import ATTACKS, NAMES, TITLES, build, split_name
from menet.attacks.spsa import SPSA
from menet.attacks.square import Square
from menet.attacks.standard import Standard
from menet.attacks.threat import ThreatModel
from menet.attacks.transfer import Transfer

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
