"""Records of an evaluation: a header, then one row per example and attack (docs/records.md has every field)."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from menet.errors import RecordError
from menet.evaluation import jsonl

FORMAT = "menet.records/2"
LARGEST = 10**7
"""Of the examples of a dataset, and of a radius in pixels: what is larger is a mistake or an attack."""
MOST_CLASSES = 10**6
"""Votes are counted in one number per class: a class of 2³¹ would take gigabytes."""

Row = dict[str, Any]

_NUMBER = (int, float)
_HEADER_TYPES: dict[str, Any] = {
    "label": str, "start": int, "stop": int, "seed": int, "model": dict, "dataset": dict, "attack": dict,
    "scoring": dict, "threat": (dict, type(None)), "fixed_draws": (dict, type(None)),
    "gradient": (str, type(None)), "p": _NUMBER, "alpha": _NUMBER, "partitions": (int, type(None)),
}  # fmt: skip
_INNER_TYPES: dict[str, dict[str, Any]] = {
    "scoring": {"draws": int},
    "threat": {"norm": str, "epsilon": (int, float, str)},
    "dataset": {"name": str, "split": str, "class_names": list},
    "attack": {"kind": str, "eot": (int, type(None)), "steps": (int, type(None))},
    "model": {"defense": (dict, type(None)), "weights": (str, type(None))},
}
_ROW_TYPES: dict[str, Any] = {
    "index": int, "label": int, "image": str, "seconds": _NUMBER, "queries": int, "gradients": int, "member": str,
    "failed": bool, "unusable_gradients": bool, "perturbation": dict, "seeds": dict, "snapshots": dict,
    "views": dict, "restarts": list, "loss_history": list, "prediction": int, "votes": int, "radius": int,
    "counts": list, "lower_bound": _NUMBER, "runner_up": _NUMBER,
}  # fmt: skip
"""Fields whose values must be of a type where they are there; other fields are not looked at."""


@dataclass(frozen=True)
class Records:
    """What one attack did to one model: the header, rows sorted by index, and which lines were damaged."""

    header: dict[str, Any]
    rows: tuple[Row, ...]
    damage: tuple[str, ...] = ()

    @property
    def evaluation(self) -> dict[str, Any]:
        """The part of the header that determines the rows."""
        return self.header["evaluation"]

    @property
    def label(self) -> str:
        return str(self.evaluation["label"])

    @property
    def missing(self) -> tuple[int, ...]:
        """Examples of the range that have no row yet."""
        there = {row["index"] for row in self.rows}
        expected = range(self.evaluation["start"], self.evaluation["stop"])
        return tuple(index for index in expected if index not in there)

    def until(self, stop: int) -> "Records":
        """The same evaluation of the examples before `stop`: their rows do not depend on the others."""
        stop = min(stop, self.evaluation["stop"])
        header = {**self.header, "evaluation": {**self.evaluation, "stop": stop}}
        return Records(header, tuple(row for row in self.rows if row["index"] < stop), self.damage)


def read(*paths: str | os.PathLike[str], damaged: bool = False) -> Records:
    """The records in the shards `paths` of one evaluation, merged.

    A bad line is an error that names it (FILE:LINE). With `damaged=True` bad lines are skipped and listed in
    `damage`; the header must be intact either way.
    """
    if not paths:
        raise RecordError("expected at least one record file, got none")
    begun = [path for path in map(Path, paths) if not _is_empty(path)]
    return _merged([_read_shard(path) for path in begun or [Path(paths[0])]], damaged)


def read_folder(folder: str | os.PathLike[str], damaged: bool = False) -> dict[str, Records]:
    """All evaluations in a folder, by label, each merged from its shards."""
    groups: dict[str, list[_ShardContent]] = {}
    for path in sorted(Path(folder).glob("*.rank*.jsonl")):
        if not _is_empty(path):
            content = _read_shard(path)
            groups.setdefault(str(content.evaluation["label"]), []).append(content)
    if not groups:
        raise RecordError(f"expected records (*.rank*.jsonl) in {folder}, found none")
    return {label: _merged(contents, damaged) for label, contents in groups.items()}


def shard_path(folder: str | os.PathLike[str], label: str, rank: int = 0) -> Path:
    """Where process `rank` keeps its rows of the evaluation called `label`."""
    return Path(folder) / f"{_stem(label)}.rank{rank}.jsonl"


def shards(folder: str | os.PathLike[str], label: str) -> list[Path]:
    """The existing shards of an evaluation, regardless of how many processes wrote them."""
    pattern = re.compile(re.escape(_stem(label)) + r"\.rank\d+\.jsonl")
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def batch_size_of(folder: str | os.PathLike[str], label: str) -> int | None:
    """The batch size of the evaluation called `label`, if its folder has one."""
    for path in shards(folder, label):
        if jsonl.has_line(path):
            size = _read_header(path)["evaluation"].get("batch_size")
            return size if isinstance(size, int) else None
    return None


class Shard:
    """One process's file of an evaluation, opened to begin, resume or extend it.

    An evaluation with a later `stop` extends one that is there; a line `{"stop": N}` says so. `made` says what
    rows are made with (versions, hardware). Where it differs from that of the rows before, a line says so, since
    such rows may differ in their last digits.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        evaluation: Mapping[str, Any],
        made: Mapping[str, Any],
        rank: int = 0,
    ) -> None:
        label = str(evaluation["label"])
        path = shard_path(folder, label, rank)
        self._file = jsonl.Appender(path)
        try:
            # A shard without a whole line belongs to a process that is about to write its header.
            contents = [_read_shard(one) for one in shards(folder, label) if jsonl.has_line(one)]
            _check_resumable(contents, evaluation)
            own = next((content for content in contents if content.path == path), None)
            if own is None:
                self._file.append([{"format": FORMAT, "evaluation": evaluation, "made": made}])
                own = _read_shard(path)
            else:
                if own.evaluation["stop"] < evaluation["stop"]:
                    self._file.append([{"stop": evaluation["stop"]}])
                    own = _read_shard(path)
                if own.made != made:
                    self._file.append([{"made": made}])
        except BaseException:
            self._file.close()
            raise
        self._header = own.header
        self._rows, self._faults = _merge(contents)

    @property
    def done(self) -> frozenset[int]:
        """The examples that have a row in any shard."""
        return frozenset(self._rows)

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows, on disk when this returns."""
        rows = list(rows)
        self._file.append(rows)
        self._rows.update((row["index"], row) for row in rows)

    def records(self) -> Records:
        """The rows found on opening and those appended since, without reading them again."""
        return _records(self._header, self._rows, self._faults, damaged=False)

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _ShardContent(NamedTuple):
    path: Path
    header: dict[str, Any]
    made: dict[str, Any]
    """What its last rows were made with."""
    lines: list[jsonl.Line]

    @property
    def evaluation(self) -> dict[str, Any]:
        return self.header["evaluation"]


def _read_shard(path: Path) -> _ShardContent:
    lines = jsonl.read(path)
    header = _header(path, next(lines, None))
    made, rows = header["made"], []
    for line in lines:
        if line.fault is None and "made" in line.content:
            made = line.content["made"]
        elif line.fault is None and line.content.keys() == {"stop"} and isinstance(line.content["stop"], int):
            header = {**header, "evaluation": {**header["evaluation"], "stop": line.content["stop"]}}
        else:
            rows.append(line._replace(fault=line.fault or _fault(line.content, header["evaluation"])))
    return _ShardContent(path, header, made, rows)


def _read_header(path: Path) -> dict[str, Any]:
    return _header(path, next(jsonl.read(path), None))


def _header(path: Path, line: jsonl.Line | None) -> dict[str, Any]:
    if line is None:
        raise RecordError(f"{path} is empty; expected a header in its first line")
    if line.fault is not None:
        raise RecordError(f"{path}:1 {line.fault}, and without its header the file cannot be used")
    return _checked(path, line.content)


def verified(path: Path, header: Any, rows: Iterable[Row]) -> Records:
    """Records from another kind of file, whose header and rows must be as good as those of a shard."""
    if not isinstance(header, dict):
        raise RecordError(f"expected a header in {path}, got {header!r:.40}")
    content = _checked(path, header)
    lines = [
        jsonl.Line(number, row, _fault(row, content["evaluation"])) for number, row in enumerate(rows, start=2)
    ]
    return _merged([_ShardContent(path, content, content["made"], lines)], damaged=False)


def _checked(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    found = content.get("format")
    if isinstance(found, str) and found.startswith("menet.records/") and found != FORMAT:
        raise RecordError(
            f"{path} has the format {found} of another version of menet, expected {FORMAT}: "
            "run the evaluation again in another folder"
        )
    if not (
        found == FORMAT
        and isinstance(content.get("evaluation"), dict)
        and isinstance(content.get("made"), dict)
        and {"label", "start", "stop"} <= content["evaluation"].keys()
    ):
        raise RecordError(f"{path}:1 is not the header of an evaluation in the format {FORMAT}")
    fault = _header_fault(content["evaluation"]) or _type_fault(content["made"], {"versions": dict}, "made.")
    if fault:
        raise RecordError(f"{path}:1 {fault}")
    return content


def _header_fault(evaluation: Mapping[str, Any]) -> str | None:
    fault = _type_fault(evaluation, _HEADER_TYPES)
    for name, types in _INNER_TYPES.items():
        if isinstance(evaluation.get(name), dict):
            fault = fault or _type_fault(evaluation[name], types, f"{name}.")
    if fault is None and isinstance(inner := evaluation.get("attack", {}).get("attack"), dict):
        fault = _type_fault(inner, _INNER_TYPES["attack"], "attack.attack.")
    if fault is None and not 0 <= evaluation["start"] <= evaluation["stop"] <= LARGEST:
        fault = f"has the range {evaluation['start']} to {evaluation['stop']}, expected examples of a dataset"
    return fault


def _type_fault(values: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> str | None:
    """What is wrong with the first value that is not of its type."""
    for name, kind in types.items():
        value = values.get(name, ...)
        # In Python a truth value is an integer; in a record it is not.
        if value is not ... and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
            return f"has {prefix}{name} = {value!r:.40}, expected {expected}"
    return None


def _fault(row: Row, evaluation: Mapping[str, Any]) -> str | None:
    for name in ("index", "label"):
        if not isinstance(row.get(name), int) or isinstance(row[name], bool):
            return f"has {name} = {row.get(name)!r:.40}, expected an integer"
    if not 0 <= row["label"] < MOST_CLASSES:
        return f"has label {row['label']!r:.40}, expected a class"
    fault = _type_fault(row, _ROW_TYPES)
    if fault:
        return fault
    for name, kinds in (("restarts", int), ("counts", int), ("loss_history", _NUMBER)):
        if not all(isinstance(one, kinds) for one in row.get(name, ())):
            return f"has {name} = {row[name]!r:.40}, expected numbers"
    if row.get("radius", 0) > LARGEST:
        return f"has radius {row['radius']}, expected pixels of an image"
    for name, one in row.get("snapshots", {}).items():
        whole = isinstance(one, dict) and isinstance(one.get("image"), dict)
        if not whole or _type_fault(one, {"prediction": int, "probability": _NUMBER}) or len(one) < 3:
            return f"has a snapshot {name:.40} without its image, prediction or probability"
    if not evaluation["start"] <= row["index"] < evaluation["stop"]:
        return f"has index {row['index']}, outside {evaluation['start']} to {evaluation['stop']}"
    if isinstance(evaluation.get("scoring"), Mapping) and "adversarial" in row:
        return next(filter(None, (_score_fault(row, kind) for kind in ("clean", "adversarial"))), None)
    return None


def _score_fault(row: Row, kind: str) -> str | None:
    """What is wrong with the scores of a row, which every accuracy is computed from."""
    scores = row.get(kind)
    if not isinstance(scores, dict):
        return f"has no {kind} scores"
    for name in ("predictions", "ranks"):
        values = scores.get(name)
        whole = isinstance(values, list) and all(type(one) is int and 0 <= one < MOST_CLASSES for one in values)
        if not whole or not values:
            return f"has {kind} {name} {values!r:.40}, expected integers >= 0, of classes"
    if len(scores["predictions"]) != len(scores["ranks"]):
        return f"has {len(scores['predictions'])} {kind} predictions and {len(scores['ranks'])} ranks"
    mean = scores.get("mean")
    if mean is not None and not (isinstance(mean, dict) and type(mean.get("rank")) is int):
        return f"has a {kind} mean {mean!r:.40}, expected its prediction, rank and probability"
    return None


def _check_resumable(contents: Iterable[_ShardContent], evaluation: Mapping[str, Any]) -> None:
    """Refuse shards of another evaluation, and damage other than a torn last line."""
    for content in contents:
        there = content.evaluation
        if there["stop"] < evaluation["stop"]:
            there = {**there, "stop": evaluation["stop"]}
        difference = _difference(there, evaluation)
        if difference:
            raise RecordError(
                f"{content.path} belongs to another evaluation: {difference}; {_remedy(difference)}"
            )
        for line in content.lines:
            if line.fault not in (None, jsonl.TORN):
                raise RecordError(
                    f"{content.path}:{line.number} {line.fault}; remove the line to have it measured again"
                )


def _remedy(difference: str) -> str:
    if ".epsilon " in difference:
        return "to keep both budgets, write one in the attack (pgd:epsilon=…), or choose another folder (--out)"
    if difference.startswith("expected stop "):
        return "a larger stop extends it; for a smaller one choose another folder (--out)"
    return "choose another folder (--out) or remove the file"


def _merge(contents: Iterable[_ShardContent]) -> tuple[dict[int, Row], list[str]]:
    rows: dict[int, Row] = {}
    faults: list[str] = []
    for content in contents:
        for line in content.lines:
            fault = line.fault
            if fault is None and line.content["index"] in rows:
                fault = f"repeats example {line.content['index']}"
            if fault is None:
                rows[line.content["index"]] = line.content
            else:
                faults.append(f"{content.path}:{line.number} {fault}")
    return rows, faults


def _merged(contents: Sequence[_ShardContent], damaged: bool) -> Records:
    # A process that was not there when the evaluation was extended has written an earlier end.
    first = max(contents, key=lambda content: content.evaluation["stop"])
    for content in contents:
        difference = _difference(first.evaluation, {**content.evaluation, "stop": first.evaluation["stop"]})
        if difference:
            raise RecordError(f"{content.path} belongs to another evaluation than {first.path}: {difference}")
    return _records(first.header, *_merge(contents), damaged)


def _records(header: dict[str, Any], rows: dict[int, Row], faults: Sequence[str], damaged: bool) -> Records:
    if faults and not damaged:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise RecordError(f"{faults[0]}{more}; pass damaged=True to use the intact rows")
    return Records(header, tuple(rows[index] for index in sorted(rows)), tuple(faults))


def _is_empty(path: Path) -> bool:
    # A process that was stopped before it wrote its header, or is about to write it.
    return path.is_file() and path.stat().st_size == 0


def _difference(there: Any, here: Any, path: Sequence[str] = ()) -> str | None:
    """The first field in which two descriptions differ, in words; None where they agree."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            found = _difference(there.get(key), here.get(key), [*path, str(key)])
            if found:
                return found
        return None
    there, here = (list(value) if isinstance(value, tuple) else value for value in (there, here))
    return None if there == here else f"expected {'.'.join(path)} {there!r:.80}, got {here!r:.80}"


def _stem(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9=,.+-]", "_", label)
