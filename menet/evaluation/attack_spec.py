"""Attacks as they are written on a command line: `pgd:steps=40,epsilon=8/255,gradient=exact`."""

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, NamedTuple

from menet import attacks
from menet.attacks import ATTACKS, Attack, ThreatModel
from menet.attacks.base import Model
from menet.errors import ConfigurationError
from menet.preprocessed import Preprocessed

GRADIENTS = ("exact", "bpda")


class FixedDraws(NamedTuple):
    """A public bank of random draws that makes a random defense deterministic while it is attacked."""

    draws: int
    seed: int = 0
    scored: bool = False
    """Whether examples are scored on the bank too, as if the defense had no randomness."""

    def described(self) -> dict[str, Any]:
        """As records have it."""
        return {"draws": self.draws, "seed": self.seed, **({"scored": True} if self.scored else {})}


@dataclass(frozen=True)
class AttackRun:
    """An attack and the model it runs on, which may be a view of the model that is scored."""

    label: str
    attack: Attack
    model: Model
    gradient: str | None = None
    """How gradients pass the preprocessing of the attacked model (the source of a transfer); None without one."""
    source: Model | None = None
    """The surrogate that the attack transfers from."""
    fixed_draws: FixedDraws | None = None
    """The bank that the attack saw in place of fresh draws. Scoring is on fresh ones, unless it is `scored`."""


def parse_attack(spec: str, model: Any, load: Callable[[str], Model] | None = None, **defaults: Any) -> AttackRun:
    """The attack that `spec` describes, on `model`.

    `NAME:SETTING=VALUE,…`, with the names of `menet.attacks.NAMES` and the settings of the attack. Settings
    of the attacked model:

    - `gradient=exact` or `gradient=bpda`: how gradients pass its preprocessing.
    - `draws=fixed:N`: attack the mean logits over a public bank of N masks (`fixed:N:SEED` for another bank).
      Boundary, HopSkipJump and AutoAttack need it on a ME-Net, since they require a deterministic model.
    - `draws=frozen:N`: the same, and score on that bank too: what remains if the attacker knows the draws.
    - `on=classifier`: the paper's gray box, which attacks the network behind the preprocessing.
    - `on=RUN`: transfer from another model, which `load` loads. `gradient` and `draws` then apply to it.

    `defaults` (such as epsilon and norm) are for attacks whose spec does not set them.
    """
    name, rest = attacks.split_name(spec)
    settings = {**defaults, **_settings(spec, rest)}
    gradient, on, draws = (settings.pop(key, None) for key in ("gradient", "on", "draws"))
    if name in ("approximate-input", "classifier-only"):
        if not isinstance(model, Preprocessed):
            raise ConfigurationError(
                f"{spec!r}: expected a model with preprocessing, got a {type(model).__name__}; "
                "choose another attack"
            )
        settings["reconstruct"] = model.reconstruct
        if name == "classifier-only":
            settings["classifier"] = model.classifier
    if name == "on-manifold":
        gan = getattr(model, "gan", None)
        if gan is None:
            raise ConfigurationError(
                f"{spec!r}: expected a model with a generator (defense-gan), got a {type(model).__name__}"
            )
        settings.update(generate=gan, classifier=model.classifier, latent=gan.latent)
    attack = _built(spec, name, settings)
    source = _source(spec, on, model, load)
    attacked = model if source is None else source
    if gradient is not None:
        attacked = _with_gradient(spec, attacked, gradient)
    used = attacked.gradient if isinstance(attacked, Preprocessed) else None
    bank = None if draws is None else _fixed_draws(spec, draws)
    if bank is not None:
        attacked = _with_fixed_draws(spec, attacked, bank)
    if bank is not None and bank.scored and source is not None:
        raise ConfigurationError(f"{spec!r}: draws=frozen is of the evaluated model; leave on={on} out")
    if source is None:
        return AttackRun(spec, attack, attacked, used, fixed_draws=bank)
    return AttackRun(spec, attacks.Transfer(attack, attacked), model, used, attacked, bank)


def _built(spec: str, name: str, settings: dict[str, Any]) -> Attack:
    """Build an attack; the words of a command line may be of another type than its settings."""
    for one in fields(ATTACKS[name].kind) if name in ATTACKS else ():  # type: ignore[arg-type]
        given = settings.get(one.name)
        if given is None:
            continue
        if one.type in (int, int | None) and type(given) is not int:
            raise ConfigurationError(f"{spec!r}: expected an integer {one.name}, got {given!r}")
        if one.type in (float, float | None) and not isinstance(given, (int, float)):
            raise ConfigurationError(f"{spec!r}: expected a number {one.name}, got {given!r}")
    attack = attacks.build(name, **settings)
    check_budget(getattr(attack, "threat", None))
    return attack


def check_budget(threat: ThreatModel | None) -> None:
    """Refuse a budget that somebody wrote for pixels of 0 to 255; the attacks themselves take any number."""
    if threat is not None and threat.norm == "linf" and threat.high - threat.low < threat.epsilon < math.inf:
        raise ConfigurationError(
            f"expected epsilon <= {threat.high - threat.low:g} for linf, as pixels are in "
            f"[{threat.low:g},{threat.high:g}], got {threat.epsilon:g}; did you mean {threat.epsilon:g}/255?"
        )


def _source(spec: str, on: Any, model: Any, load: Callable[[str], Model] | None) -> Any:
    if on is None:
        return None
    if on == "classifier" and isinstance(model, Preprocessed):
        return model.classifier
    if load is None:
        raise ConfigurationError(f"{spec!r}: on={on} names a model, but no `load` was given to load it")
    return load(str(on))


def _with_gradient(spec: str, model: Any, gradient: Any) -> Preprocessed:
    if gradient not in GRADIENTS:
        raise ConfigurationError(f"{spec!r}: expected gradient=exact or gradient=bpda, got {gradient!r}")
    if not isinstance(model, Preprocessed):
        raise ConfigurationError(
            f"{spec!r}: gradient={gradient} needs an attacked model with preprocessing, got a "
            f"{type(model).__name__}; leave it out"
        )
    return model.with_gradient(gradient)


def _fixed_draws(spec: str, text: Any) -> FixedDraws:
    kind, *numbers = str(text).split(":")
    words = ("fixed", "frozen")
    if kind not in words or len(numbers) not in (1, 2) or not all(one.isdecimal() for one in numbers):
        raise ConfigurationError(
            f"{spec!r}: expected draws=fixed:N or draws=frozen:N, or with :SEED behind it, got draws={text}"
        )
    bank = FixedDraws(int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0, kind == "frozen")
    if bank.draws < 1:
        raise ConfigurationError(f"{spec!r}: expected at least 1 fixed draw, got {bank.draws}")
    return bank


def _with_fixed_draws(spec: str, model: Any, bank: FixedDraws) -> Model:
    if not hasattr(model, "fixed"):
        raise ConfigurationError(
            f"{spec!r}: draws=fixed needs an attacked model with a mask bank (a ME-Net), got a "
            f"{type(model).__name__}; leave it out"
        )
    fixed: Model = model.fixed(bank.draws, bank.seed)
    return fixed


def _settings(spec: str, rest: str) -> dict[str, Any]:
    settings = {}
    for part in filter(None, rest.split(",")):
        key, sign, value = part.partition("=")
        if not sign or not key:
            raise ConfigurationError(f"{spec!r}: expected SETTING=VALUE, got {part!r}")
        settings[key.strip().replace("-", "_")] = number_or_word(value.strip())
    return settings


def number_or_word(text: str) -> Any:
    """`text` as a number (fractions like 8/255 too), True, False or None where it is one, else itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        return text
