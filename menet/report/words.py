"""Attacks, models and numbers as people read them."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from menet.evaluation.accuracy import Accuracy
from menet.evaluation.records import Records

ATTACK_NAMES = {"PGD": "PGD", "APGD": "APGD", "FGSM": "FGSM", "CWL2": "CW"}


def attack_words(records: Records) -> str:
    """The attack of `records` in a few words: what it follows, how long, how many masks, how far."""
    evaluation = records.evaluation
    attack = evaluation["attack"]
    inner = attack.get("attack") if attack.get("kind") == "Transfer" else None
    settings = inner or attack
    name = ATTACK_NAMES.get(settings.get("kind", ""), settings.get("kind", records.label))
    if inner:
        name = f"transfer ({name})"
    elif evaluation.get("gradient"):
        name = f"{name}, {'BPDA' if evaluation['gradient'] == 'bpda' else 'exact gradient'}"
    parts = [name]
    if settings.get("steps"):
        parts.append(counted(settings["steps"], "step"))
    if (settings.get("restarts") or 1) > 1:
        parts.append(counted(settings["restarts"], "restart"))
    if (settings.get("eot") or 1) > 1:
        parts.append(f"EOT over {settings['eot']} masks")
    return ", ".join(parts)


def threat_words(evaluation: Mapping[str, Any]) -> str:
    """The threat model: ℓ∞ with ε = 8/255."""
    threat = evaluation.get("threat")
    if not threat:
        return "no bound"
    norm = {"linf": "ℓ∞", "l2": "ℓ2"}.get(threat["norm"], threat["norm"])
    return f"{norm} ≤ {size(threat['epsilon'])}"


def size(epsilon: Any) -> str:
    """A size in pixels of [0,1], as a fraction of 255 where it is one."""
    if not isinstance(epsilon, (int, float)):
        return "any"
    over = Fraction(epsilon * 255).limit_denominator(1)
    if 0 < over <= 16 and abs(float(over) / 255 - epsilon) < 1e-9:
        return f"{over}/255"
    return f"{epsilon:.4g}"


def model_words(records: Records) -> str:
    """The network and its defense in a few words."""
    model = records.evaluation["model"]
    architecture = model.get("architecture")
    network = architecture.get("name", "network") if isinstance(architecture, Mapping) else str(architecture)
    defense = model.get("defense") or {}
    if not defense:
        return network
    words = f"{network} behind {defense.get('name', 'a defense')}"
    estimator = defense.get("estimator")
    if isinstance(estimator, Mapping):
        words += f" ({estimator.get('name', '')}"
        p = defense.get("p")
        words += f", p {'→'.join(f'{one:g}' for one in p)})" if isinstance(p, list) else f", p {p})"
    return words


def counted(number: int, noun: str) -> str:
    """`1 step`, `40 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def interval(number: Accuracy) -> str:
    return f"{100 * number.low:.1f}–{100 * number.high:.1f}"


def signed(value: float) -> str:
    """A difference to one digit, with a true minus."""
    return f"{value:+.1f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
