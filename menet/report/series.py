"""Curves hidden in records: evaluations that differ in one number, votes of more masks, losses by step."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from menet.evaluation.accuracy import Accuracy, accuracy, vote_rank
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.intervals import clopper_pearson
from menet.evaluation.records import Records
from menet.report.collect import Subject


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
    """A number of an evaluation that a curve can be drawn against."""

    name: str
    title: str
    label: str
    value: Callable[[Mapping[str, Any]], float | None]
    clean_at: float | None = None
    """Where the accuracy on clean images belongs, if anywhere."""
    logarithmic: bool = False


def sweeps(subjects: Sequence[Subject]) -> dict[Axis, list[Series]]:
    """For each axis the curves of evaluations that agree in everything but that number, three or more points.

    For `p`, evaluations of different models are joined where only the defense's p tells them apart.
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


def voting(records: Records) -> Series | None:
    """The accuracy of the vote of the first k scoring masks, k = 1, 2, …: what voting gains on its own."""
    masks = int(records.evaluation["scoring"]["masks"])
    if masks < 3:
        return None
    points = []
    for count in sorted({round(masks ** (step / 12)) for step in range(13)}):
        right = sum(
            vote_rank(row["adversarial"]["predictions"][:count], row["label"]) == 0 for row in records.rows
        )
        low, high = clopper_pearson(right, len(records.rows))
        points.append(Point(count, right / len(records.rows), low, high))
    return Series(records.label, tuple(points))


def losses(records: Records) -> Series | None:
    """The mean loss of the attack at its start and after each step, where the rows kept it."""
    traces = [row["trace"] for row in records.rows if row.get("trace")]
    if not traces or len({len(trace) for trace in traces}) != 1:
        return None
    mean = np.asarray(traces, float).mean(0)
    return Series(records.label, tuple(Point(step, value, value, value) for step, value in enumerate(mean)))


def certified(subject: Subject) -> Series | None:
    """Certified accuracy against the number of changed pixels."""
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
    Axis("epsilon", "Accuracy against the size of the change", "ε (pixels of [0,1])", _epsilon, clean_at=0.0),
    Axis("steps", "Accuracy against the attack's steps", "steps", _setting("steps"), logarithmic=True),
    Axis("eot", "Accuracy against masks per gradient", "masks per gradient", _setting("eot"), logarithmic=True),
    Axis("p", "Accuracy against the share of observed pixels", "mean of p", _p),
)


def _rest(evaluation: Mapping[str, Any], axis: Axis, name: str) -> str:
    """All of an evaluation but what varies along the axis, as text to compare by."""
    rest = json.loads(json.dumps({key: evaluation[key] for key in ("dataset", "attack", "gradient", "threat")}))
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
    transferred = "transfer " if attack.get("kind") == "Transfer" else ""
    exact = ", exact" if records.evaluation.get("gradient") == "exact" else ""
    return f"{transferred}{kind}" + (f" + EOT {eot}" if eot > 1 else "") + exact


def _point(at: float, number: Accuracy) -> Point:
    return Point(at, number.value, number.low, number.high)
