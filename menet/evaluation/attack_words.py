"""Attacks as one writes them on a command line: `pgd:steps=40,epsilon=8/255,gradient=exact`."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from menet import attacks
from menet.attacks import Attack
from menet.attacks.kinds import Model
from menet.errors import ConfigurationError
from menet.preprocessed import Preprocessed

GRADIENTS = ("exact", "bpda")


@dataclass(frozen=True)
class Assignment:
    """An attack and the model it is to work on, which may be a view of the one that is scored."""

    label: str
    attack: Attack
    model: Model
    gradient: str | None = None
    """How gradients pass a defense's preprocessing, where that is a choice."""
    source: Model | None = None
    """The model that the attack transfers from."""


def assign(words: str, model: Any, load: Callable[[str], Model] | None = None, **defaults: Any) -> Assignment:
    """The attack that `words` name, on `model`.

    `NAME:SETTING=VALUE,…` with the names of `menet.attacks.NAMES`. For a defended model also `gradient=exact`
    or `bpda`, and `on=classifier` for the paper's gray box: attack the network behind the preprocessing,
    blind to it. `on=RUN` transfers from another model, which `load` loads. `defaults` (epsilon, norm) are of
    attacks that do not say otherwise.
    """
    name, _, rest = words.partition(":")
    settings = {**defaults, **_settings(words, rest)}
    gradient, on = settings.pop("gradient", None), settings.pop("on", None)
    attacked = model
    if gradient is not None:
        if gradient not in GRADIENTS or not isinstance(model, Preprocessed):
            raise ConfigurationError(f"{words!r}: gradient is exact or bpda, on a model with a preprocessing")
        attacked = model.with_gradient(gradient)
    if name in ("approximate-input", "after-preprocessing"):
        if not isinstance(model, Preprocessed):
            raise ConfigurationError(f"{words!r} is an attack on a preprocessing, and the model has none")
        settings["reconstruct"] = model.reconstruct
        if name == "after-preprocessing":
            settings["classifier"] = model.classifier
    attack = attacks.build(name, **settings)
    source: Model | None = None
    if on == "classifier" and isinstance(model, Preprocessed):
        source = model.classifier
    elif on is not None:
        if load is None:
            raise ConfigurationError(f"{words!r}: on={on} names a model, and there is no way to load one here")
        source = load(str(on))
    if source is not None:
        attack = attacks.Transfer(attack, source)
    chosen = attacked.gradient if isinstance(attacked, Preprocessed) else None
    return Assignment(words, attack, attacked, chosen, source)


def _settings(words: str, rest: str) -> dict[str, Any]:
    settings = {}
    for part in filter(None, rest.split(",")):
        key, sign, value = part.partition("=")
        if not sign or not key:
            raise ConfigurationError(f"{words!r}: {part!r} is not SETTING=VALUE")
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
