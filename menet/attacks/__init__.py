"""Attacks: small frozen objects called as `attack(model, images, labels, generator=…) -> AttackResult`.

They see a callable images → logits and nothing of what is behind it. `build(name, epsilon=…)` makes one by
name.
"""

from menet.attacks.after_preprocessing import AfterPreprocessing
from menet.attacks.apgd import APGD
from menet.attacks.approximate_input import ApproximateInput
from menet.attacks.autoattack import AutoAttack, AutoAttackRand
from menet.attacks.base import Attack
from menet.attacks.boundary import Boundary
from menet.attacks.cw import CW
from menet.attacks.cw_l2 import CWL2
from menet.attacks.fgsm import FGSM
from menet.attacks.hop_skip_jump import HopSkipJump
from menet.attacks.losses import DLR, CrossEntropy, Margin
from menet.attacks.pgd import PGD
from menet.attacks.projected_bpda import ProjectedBPDA
from menet.attacks.ranges import AttackedBatch, TensorExamples, attack_range
from menet.attacks.registry import ATTACKS, NAMES, build
from menet.attacks.result import AttackResult, concatenate, fooled_by_restart
from menet.attacks.spsa import SPSA
from menet.attacks.square import Square
from menet.attacks.strongest import Strongest
from menet.attacks.targeted import MultiTargeted
from menet.attacks.threat import ThreatModel
from menet.attacks.transfer import Transfer, gray_box

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
    "AfterPreprocessing",
    "ApproximateInput",
    "Attack",
    "AttackResult",
    "AttackedBatch",
    "AutoAttack",
    "AutoAttackRand",
    "Boundary",
    "CrossEntropy",
    "HopSkipJump",
    "Margin",
    "MultiTargeted",
    "ProjectedBPDA",
    "Square",
    "Strongest",
    "TensorExamples",
    "ThreatModel",
    "Transfer",
    "attack_range",
    "build",
    "concatenate",
    "fooled_by_restart",
    "gray_box",
]
