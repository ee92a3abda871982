"""Attacks by name, for the command line and for records."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from menet.attacks import losses
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
from menet.attacks.losses import DLR, CrossEntropy
from menet.attacks.pgd import PGD
from menet.attacks.projected_bpda import ProjectedBPDA
from menet.attacks.spsa import SPSA
from menet.attacks.square import Square
from menet.attacks.targeted import MultiTargeted
from menet.attacks.threat import ThreatModel
from menet.errors import ConfigurationError


@dataclass(frozen=True)
class Entry:
    """One name: the attack it stands for, the settings that make it so, and a line of explanation."""

    kind: type[Attack]
    summary: str
    settings: dict[str, Any] = field(default_factory=dict)
    around: Callable[[Attack], Attack] | None = None
    """What the attack is put into, when the name means more than one attack."""


ATTACKS: dict[str, Entry] = {
    "fgsm": Entry(FGSM, "one gradient step"),
    "pgd": Entry(PGD, "projected gradient descent"),
    "pgd-targeted": Entry(PGD, "PGD towards each of the likeliest wrong classes", around=MultiTargeted),
    "cw": Entry(CW, "PGD on the margin with confidence 50 (the paper's CW)"),
    "cw-l2": Entry(CWL2, "smallest l2 change, with a confidence"),
    "bpda": Entry(PGD, "PGD with 1000 steps, on a model whose gradient is bpda", {"steps": 1000}),
    "bpda-eot": Entry(PGD, "the same in expectation over 20 masks, 200 steps", {"steps": 200, "eot": 20}),
    "approximate-input": Entry(ApproximateInput, "the paper's adaptive attack at the reconstruction"),
    "projected-bpda": Entry(ProjectedBPDA, "the paper's adaptive attack along top singular vectors"),
    "after-preprocessing": Entry(AfterPreprocessing, "white-box on the network after the preprocessing"),
    "boundary": Entry(Boundary, "decision-based random walk"),
    "hop-skip-jump": Entry(HopSkipJump, "decision-based, with estimated gradients"),
    "spsa": Entry(SPSA, "score-based, with estimated gradients"),
    "square": Entry(Square, "score-based random search"),
    "apgd-ce": Entry(APGD, "Auto-PGD on cross-entropy", {"loss": CrossEntropy()}),
    "apgd-dlr": Entry(APGD, "Auto-PGD on the difference of logits ratio", {"loss": DLR()}),
    "apgd-targeted": Entry(APGD, "Auto-PGD towards 9 classes", {"loss": DLR()}, around=MultiTargeted),
    "autoattack": Entry(AutoAttack, "the standard suite, for deterministic models"),
    "autoattack-rand": Entry(AutoAttackRand, "the suite for random models"),
}

NAMES = tuple(ATTACKS)


def build(name: str, **settings: Any) -> Attack:
    """The attack of that name.

    `settings` are its fields, and `norm`, `epsilon`, `low`, `high` those of its threat model. `loss` may be a
    name ("cross-entropy", "margin", "dlr"). The adaptive attacks need `reconstruct=`, and
    "after-preprocessing" also `classifier=`.
    """
    if name not in ATTACKS:
        raise ConfigurationError(f"attack is {name!r}; accepted are {', '.join(NAMES)}")
    entry = ATTACKS[name]
    known = {one.name: one for one in fields(entry.kind)}  # type: ignore[arg-type]
    limits = {one.name: settings.pop(one.name) for one in fields(ThreatModel) if one.name in settings}
    if limits:
        default: ThreatModel = known["threat"].default  # type: ignore[assignment]
        settings["threat"] = ThreatModel(**{**_values(settings.get("threat", default)), **limits})
    if isinstance(settings.get("loss"), str):
        settings["loss"] = losses.build(settings["loss"])
    settings = {**entry.settings, **settings}
    unknown = sorted(set(settings) - set(known))
    if unknown:
        accepted = ", ".join(sorted((set(known) - {"threat"}) | {one.name for one in fields(ThreatModel)}))
        raise ConfigurationError(f"attack {name!r} has no setting {unknown[0]!r}; accepted are {accepted}")
    missing = sorted(one.name for one in known.values() if _required(one) and one.name not in settings)
    if missing:
        raise ConfigurationError(f"attack {name!r} needs the setting {missing[0]!r}")
    attack = entry.kind(**settings)
    return attack if entry.around is None else entry.around(attack)


def _required(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _values(threat: ThreatModel) -> dict[str, Any]:
    return {one.name: getattr(threat, one.name) for one in fields(threat)}
