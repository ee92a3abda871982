"""Curves that records contain: accuracy against one setting or the number of votes, and loss by step."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from menet.attacks import TITLES
from menet.evaluation.accuracy import Accuracy, accuracy, clopper_pearson, vote_rank
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.records import Records
from menet.report.collect import Subject

ATTACK_NAMES = TITLES
"""Names of attacks in tables and legends, where they differ from those of their classes."""


@dataclass(frozen=True)
class Point:
    """A value with its interval; `low` and `high` are the value itself where there is none."""

    at: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Axis:
    """A setting of an evaluation that a curve can be drawn against."""

    name: str
    title: str
    label: str
    value: Callable[[Mapping[str, Any]], float | None]
    clean_at: float | None = None
    """The value at which clean accuracy is the first point, if any."""
    logarithmic: bool = False


def sweeps(subjects: Sequence[Subject]) -> dict[Axis, list[Series]]:
    """For each axis, the curves of evaluations that differ in that setting alone, with three or more points.

    For `p`, a curve joins evaluations of models that differ only in the defense's p.
    """
    found: dict[Axis, list[Series]] = {}
    for axis in AXES:
        groups: dict[str, list[tuple[str, Records]]] = {}
        for subject in subjects:
            for records in subject.evaluations.values():
                if axis.value(records.evaluation) is not None:
                    key = _rest(records.evaluation, axis, subject.name)
                    groups.setdefault(key, []).append((subject.name, records))
        curves = [series for group in groups.values() if (series := _curve(axis, group)) is not None]
        if curves:
            found[axis] = curves
    return found


def worst_cases(subjects: Sequence[Subject]) -> list[Series]:
    """For each model, robust accuracy over ε, at each the lowest over its attacks; clean accuracy is at 0."""
    found = []
    for subject in subjects:
        lowest: dict[float, Accuracy] = {}
        for records in subject.evaluations.values():
            epsilon = _epsilon(records.evaluation)
            if epsilon is None or records.evaluation["threat"]["norm"] != "linf":
                continue
            number = accuracy(records)
            if epsilon not in lowest or number.value < lowest[epsilon].value:
                lowest[epsilon] = number
            lowest.setdefault(0.0, accuracy(records, "clean"))
        if len(lowest) > 1:
            points = tuple(_point(epsilon, lowest[epsilon]) for epsilon in sorted(lowest))
            found.append(Series(subject.name, points))
    return found


def voting(records: Records) -> Series | None:
    """Accuracy of the majority vote over the first k scoring draws, k = 1, 2, …: what voting gains on its own."""
    draws = int(records.evaluation["scoring"]["draws"])
    if draws < 3:
        return None
    points = []
    for count in sorted({round(draws ** (step / 12)) for step in range(13)}):
        right = sum(
            vote_rank(row["adversarial"]["predictions"][:count], row["label"]) == 0 for row in records.rows
        )
        low, high = clopper_pearson(right, len(records.rows))
        points.append(Point(count, right / len(records.rows), low, high))
    return Series(records.label, tuple(points))


def losses(records: Records) -> Series | None:
    """The mean loss of the attack at its start and after each step, if the rows have loss histories."""
    histories = [row["loss_history"] for row in records.rows if row.get("loss_history")]
    if not histories or len({len(history) for history in histories}) != 1:
        return None
    mean = np.asarray(histories, float).mean(0)
    return Series(records.label, tuple(Point(step, value, value, value) for step, value in enumerate(mean)))


def certified(subject: Subject) -> Series | None:
    """Certified accuracy against the number of perturbed pixels."""
    if subject.certificate is None:
        return None
    found = certified_accuracies(subject.certificate)
    points = tuple(_point(radius, number) for radius, number in found.items())
    return Series(subject.name, points)


def _attack(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    attack = evaluation["attack"]
    inner = attack.get("attack")
    return inner if isinstance(inner, Mapping) else attack


def _setting(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    def value(evaluation: Mapping[str, Any]) -> float | None:
        found = _attack(evaluation).get(name)
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None

    return value


def _epsilon(evaluation: Mapping[str, Any]) -> float | None:
    found = (evaluation.get("threat") or {}).get("epsilon")
    return float(found) if isinstance(found, (int, float)) else None


def _p(evaluation: Mapping[str, Any]) -> float | None:
    p = (evaluation["model"].get("defense") or {}).get("p")
    if isinstance(p, list):
        return float(sum(p) / len(p))
    return float(p) if isinstance(p, (int, float)) else None


AXES = (
    Axis("epsilon", "Robust accuracy by perturbation budget", "ε (pixels in [0,1])", _epsilon, clean_at=0.0),
    Axis("steps", "Robust accuracy by attack steps", "steps", _setting("steps"), logarithmic=True),
    Axis("eot", "Robust accuracy by draws per gradient", "draws per gradient", _setting("eot"), logarithmic=True),
    Axis("p", "Robust accuracy by observation probability", "mean of p", _p),
)


def _rest(evaluation: Mapping[str, Any], axis: Axis, name: str) -> str:
    """Everything in an evaluation except what varies along the axis, as text to compare by."""
    rest = json.loads(
        json.dumps(
            {key: evaluation.get(key) for key in ("dataset", "attack", "gradient", "fixed_draws", "threat")}
        )
    )
    inner: Any = _attack(rest)
    for part in (rest["attack"], inner):
        part.pop(axis.name, None)
        if axis.name == "epsilon":
            part.pop("threat", None)
            part.pop("step_size", None)
        if axis.name == "steps":
            part.pop("step_size", None)
    if axis.name == "epsilon" and rest["threat"]:
        rest["threat"].pop("epsilon", None)
    if axis.name == "p":
        return json.dumps(rest, sort_keys=True)
    return json.dumps([name, rest], sort_keys=True)


def _curve(axis: Axis, group: list[tuple[str, Records]]) -> Series | None:
    points = {}
    for _, records in group:
        at = axis.value(records.evaluation)
        assert at is not None
        points[at] = _point(at, accuracy(records, "adversarial", "expected"))
    if len(points) + (axis.clean_at is not None) < 3 or len(points) < 2:
        return None
    if axis.clean_at is not None and axis.clean_at not in points:
        points[axis.clean_at] = _point(axis.clean_at, accuracy(group[0][1], "clean", "expected"))
    names = list(dict.fromkeys(name for name, _ in group))
    name = names[0] if len(names) == 1 else "all models"
    return Series(f"{name}, {_kind(group[0][1])}", tuple(points[at] for at in sorted(points)))


def _kind(records: Records) -> str:
    attack = records.evaluation["attack"]
    eot = _attack(records.evaluation).get("eot") or 1
    kind = str(_attack(records.evaluation).get("kind", "attack"))
    transfer = "transfer " if attack.get("kind") == "Transfer" else ""
    exact = ", exact" if records.evaluation.get("gradient") == "exact" else ""
    return f"{transfer}{ATTACK_NAMES.get(kind, kind)}" + (f" + EOT {eot}" if eot > 1 else "") + exact


def _point(at: float, number: Accuracy) -> Point:
    return Point(at, number.value, number.low, number.high)
