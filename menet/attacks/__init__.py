"""Attacks: small frozen objects called as `attack(model, images, labels, generator=…) -> AttackResult`.

They see a callable images → logits and nothing of what is behind it. `build(name, epsilon=…)` makes one by
name, for the command line and for records; `ATTACKS` has the names. To write your own, see `Attack`; to step in
another way, `StepRule`.
"""

import difflib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from menet.attacks import losses
from menet.attacks.adaptive import ApproximateInput, ClassifierOnly, LowFrequency, OnManifold, ProjectedBPDA
from menet.attacks.ascent import LossOracle, StepRule
from menet.attacks.base import Attack, AttackResult, GradientWarning, Task, is_deterministic
from menet.attacks.ensemble import AutoAttackRand, MultiTargeted, Transfer, WorstCase
from menet.attacks.external import CWL2, AutoAttack, Boundary, HopSkipJump
from menet.attacks.losses import DLR, CrossEntropy, Margin
from menet.attacks.pgd import APGD, CW, FGSM, PGD, SmallestPGD
from menet.attacks.score_based import SPSA, CoordinateSearch, RandomSearch, Square
from menet.attacks.standard import Standard
from menet.attacks.threat import CIFAR10, ThreatModel
from menet.errors import ConfigurationError

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
    "CoordinateSearch",
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
    "SmallestPGD",
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


@dataclass(frozen=True)
class Entry:
    """A name: the class of the attack, the settings that differ from its defaults, and one line of help."""

    kind: type[Attack]
    summary: str
    settings: dict[str, Any] = field(default_factory=dict)
    wrapper: Callable[[Attack], Attack] | None = None
    """What the attack is wrapped in, if the name stands for more than one attack."""


ATTACKS: dict[str, Entry] = {
    "standard": Entry(Standard, "worst case over attacks in expectation, without parameters: report this one"),
    "fgsm": Entry(FGSM, "one gradient step"),
    "pgd": Entry(PGD, "projected gradient descent"),
    "pgd-targeted": Entry(PGD, "PGD towards each of the likeliest wrong classes", wrapper=MultiTargeted),
    "pgd-smallest": Entry(
        SmallestPGD, "PGD within the smallest budget that fools, as foolbox 1: to compare with evaluations by it"
    ),
    "cw": Entry(CW, "PGD on the margin with confidence 50 (the paper's CW)"),
    "cw-l2": Entry(CWL2, "minimum-norm l2 attack, with a confidence"),
    "bpda": Entry(PGD, "PGD with 1000 steps, for a model whose gradient is bpda", {"steps": 1000}),
    "bpda-eot": Entry(PGD, "PGD with 200 steps, in expectation over 20 draws (EOT)", {"steps": 200, "eot": 20}),
    "approximate-input": Entry(ApproximateInput, "the paper's adaptive attack around the reconstruction"),
    "projected-bpda": Entry(ProjectedBPDA, "the paper's adaptive attack along top singular vectors"),
    "low-frequency": Entry(LowFrequency, "PGD restricted to smooth perturbations"),
    "classifier-only": Entry(ClassifierOnly, "white-box on the classifier behind the preprocessing"),
    "on-manifold": Entry(OnManifold, "on images of the generator that a defense projects onto"),
    "boundary": Entry(Boundary, "decision-based random walk"),
    "hop-skip-jump": Entry(HopSkipJump, "decision-based, with estimated gradients"),
    "spsa": Entry(SPSA, "score-based, with estimated gradients"),
    "square": Entry(Square, "score-based random search"),
    "random-search": Entry(RandomSearch, "score-based in expectation: squares for linf, pixels for l0"),
    "coordinate-search": Entry(
        CoordinateSearch, "score-based greedy search over single values, for models that round pixels"
    ),
    "apgd-ce": Entry(APGD, "Auto-PGD on cross-entropy", {"loss": CrossEntropy()}),
    "apgd-dlr": Entry(APGD, "Auto-PGD on the difference of logits ratio", {"loss": DLR()}),
    "apgd-targeted": Entry(
        APGD, "Auto-PGD towards the 9 likeliest wrong classes", {"loss": DLR()}, wrapper=MultiTargeted
    ),
    "autoattack": Entry(AutoAttack, "AutoAttack's standard suite, for deterministic models"),
    "autoattack-rand": Entry(AutoAttackRand, "AutoAttack for random models"),
}

NAMES = tuple(ATTACKS)

_KINDS: tuple[type[Attack], ...] = (
    *(entry.kind for entry in ATTACKS.values()),
    MultiTargeted,
    Transfer,
    WorstCase,
)
TITLES: dict[str, str] = {kind.__name__: kind.title for kind in _KINDS}
"""Titles for reports, by the class names that records hold; a class not listed is its own title."""


def build(name: str, **settings: Any) -> Attack:
    """The attack of that name, or of a class of your own: `build("package.module:Class", steps=10)`.

    `settings` are its fields, and `norm`, `epsilon`, `low`, `high` those of its threat model. `loss` may be a
    name ("cross-entropy", "margin", "dlr"). The adaptive attacks need `reconstruct=`, "classifier-only" also
    `classifier=`, "on-manifold" `generate=`, `latent=` and `classifier=`. A name with a colon **imports that
    module, and so executes its code**.
    """
    entry = Entry(_load(name), "") if ":" in name else _lookup(name)
    known = {one.name: one for one in fields(entry.kind)}  # type: ignore[arg-type]
    budget = {one.name: settings.pop(one.name) for one in fields(ThreatModel) if one.name in settings}
    if budget:
        default = known["threat"].default if "threat" in known else None
        threat = settings.get("threat", default if isinstance(default, ThreatModel) else CIFAR10)
        settings["threat"] = ThreatModel(**{**_values(threat), **budget})
    if isinstance(settings.get("loss"), str):
        settings["loss"] = losses.build(settings["loss"])
    settings = {**entry.settings, **settings}
    unknown = sorted(set(settings) - set(known))
    if unknown:
        choices = sorted((set(known) - {"threat"}) | {one.name for one in fields(ThreatModel)})
        raise ConfigurationError(
            f"unknown setting {unknown[0]!r} of attack {name!r}; {_choices(unknown[0], choices)}"
        )
    missing = sorted(one.name for one in known.values() if _required(one) and one.name not in settings)
    if missing:
        raise ConfigurationError(f"attack {name!r} needs the setting {missing[0]!r}")
    attack = entry.kind(**settings)
    return attack if entry.wrapper is None else entry.wrapper(attack)


def split_name(text: str) -> tuple[str, str]:
    """The name and the settings of `NAME:SETTINGS`, where NAME may be `package.module:Class`."""
    name, _, rest = text.partition(":")
    kind, _, settings = rest.partition(":")
    if name not in ATTACKS and kind.isidentifier():
        return f"{name}:{kind}", settings
    return name, rest


def _lookup(name: str) -> Entry:
    if name not in ATTACKS:
        raise ConfigurationError(f"unknown attack {name!r}; {_choices(name, NAMES)}")
    return ATTACKS[name]


def _load(name: str) -> type[Attack]:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # Whatever the module raises; its traceback stays attached.
        raise ConfigurationError(
            f"expected an attack package.module:Class, got {name!r}: {type(error).__name__}: {error!s:.200}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Attack) and is_dataclass(kind)):
        raise ConfigurationError(
            f"expected {name!r} to be a dataclass derived from menet.attacks.Attack, got {kind!r}"
        )
    return kind


def _choices(name: str, choices: Iterable[str]) -> str:
    known = list(choices)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"choose from {', '.join(known)}{hint}"


def _required(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _values(threat: ThreatModel) -> dict[str, Any]:
    return {one.name: getattr(threat, one.name) for one in fields(threat)}
