"""Records of an evaluation: a header, then one row per example and attack (docs/records.md has every field)."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from menet.errors import RecordError
from menet.evaluation import lines

FORMAT = "menet.records/1"

Row = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """What one attack did to one model: the header, rows in the order of their index, and what was damaged."""

    header: dict[str, Any]
    rows: tuple[Row, ...]
    damage: tuple[str, ...] = ()

    @property
    def evaluation(self) -> dict[str, Any]:
        """The part of the header that decides what the rows are."""
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


def read(*paths: str | os.PathLike[str], damaged: bool = False) -> Records:
    """The records in the shards `paths` of one evaluation, merged.

    Any bad line is an error that names it (FILE:LINE). With `damaged=True` what is sound is used, and the bad
    lines are named in `damage`; the header must be sound either way.
    """
    if not paths:
        raise RecordError("no record files were given")
    header: dict[str, Any] | None = None
    rows: dict[int, Row] = {}
    faults: list[str] = []
    for path in map(Path, paths):
        if header is not None and _is_empty(path):
            continue
        own = _header_of(path)
        if header is None:
            header = own
        difference = _difference(header["evaluation"], own["evaluation"])
        if difference:
            raise RecordError(f"{path} belongs to another evaluation than {paths[0]}: {difference}")
        for line in _rows_of(path, own):
            fault = line.fault
            if fault is None and line.content["index"] in rows:
                fault = f"repeats example {line.content['index']}"
            if fault is None:
                rows[line.content["index"]] = line.content
            else:
                faults.append(f"{path}:{line.number} {fault}")
    if faults and not damaged:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise RecordError(f"{faults[0]}{more}; the sound rows are used only if asked for")
    assert header is not None
    return Records(header, tuple(rows[index] for index in sorted(rows)), tuple(faults))


def read_folder(folder: str | os.PathLike[str], damaged: bool = False) -> dict[str, Records]:
    """All evaluations in a folder, by label, each merged from its shards."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(Path(folder).glob("*.rank*.jsonl")):
        if _is_empty(path):
            continue
        groups.setdefault(str(_header_of(path)["evaluation"]["label"]), []).append(path)
    if not groups:
        raise RecordError(f"{folder} holds no records (*.rank*.jsonl)")
    return {label: read(*paths, damaged=damaged) for label, paths in groups.items()}


def shard_path(folder: str | os.PathLike[str], label: str, rank: int = 0) -> Path:
    """Where process `rank` keeps its rows of the evaluation called `label`."""
    return Path(folder) / f"{_stem(label)}.rank{rank}.jsonl"


def shards(folder: str | os.PathLike[str], label: str) -> list[Path]:
    """The shards of an evaluation that are there, whatever number of processes made them."""
    pattern = re.compile(re.escape(_stem(label)) + r"\.rank\d+\.jsonl")
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


class Shard:
    """One process's file of an evaluation, opened to be begun or continued.

    `made` says with what rows are made (versions, hardware). When it differs from that of the rows before, a
    line says so, since such rows may differ in their last digits.
    """

    def __init__(self, path: Path, evaluation: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        self._file = lines.Appender(path)
        try:
            if self._file.empty:
                header = {"format": FORMAT, "evaluation": evaluation, "made": made}
                self._file.append([header])
            else:
                self._continue(path, evaluation, made)
        except BaseException:
            self._file.close()
            raise

    def _continue(self, path: Path, evaluation: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        header = _header_of(path)
        difference = _difference(header["evaluation"], evaluation)
        if difference:
            raise RecordError(
                f"{path} belongs to another evaluation: {difference}; choose another folder or remove the file"
            )
        last = header["made"]
        for line in lines.read(path):
            last = line.content.get("made", last)
        if last != made:
            self._file.append([{"made": made}])

    def append(self, rows: Iterable[Row]) -> None:
        self._file.append(rows)

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def present(folder: str | os.PathLike[str], label: str) -> set[int]:
    """The examples that already have a row in any shard; damage other than a torn last line is an error."""
    found = set()
    for path in shards(folder, label):
        for line in lines.read(path):
            if line.number == 1 or "made" in line.content or (line.fault or "").startswith("is torn"):
                continue
            fault = line.fault or _fault_of(line.content, None)
            if fault:
                raise RecordError(f"{path}:{line.number} {fault}; remove the line to have it measured again")
            found.add(line.content["index"])
    return found


def _is_empty(path: Path) -> bool:
    # A process that was stopped before it wrote its header, or is about to write it.
    return path.is_file() and path.stat().st_size == 0


def _header_of(path: Path) -> dict[str, Any]:
    first = next(lines.read(path), None)
    if first is None:
        raise RecordError(f"{path} is empty; its first line should be a header")
    if first.fault is None and not (
        first.content.get("format") == FORMAT
        and isinstance(first.content.get("evaluation"), dict)
        and isinstance(first.content.get("made"), dict)
        and {"label", "start", "stop"} <= first.content["evaluation"].keys()
    ):
        raise RecordError(f"{path}:1 is not the header of an evaluation in the format {FORMAT}")
    if first.fault is not None:
        raise RecordError(f"{path}:1 {first.fault}, and without its header nothing of the file can be used")
    return first.content


def _rows_of(path: Path, header: dict[str, Any]) -> Iterator[lines.Line]:
    for line in lines.read(path):
        if line.number == 1 or (line.fault is None and "made" in line.content):
            continue
        fault = line.fault or _fault_of(line.content, header["evaluation"])
        yield line._replace(fault=fault)


def _fault_of(row: Row, evaluation: Mapping[str, Any] | None) -> str | None:
    for name in ("index", "label"):
        if not isinstance(row.get(name), int) or isinstance(row[name], bool):
            return f"has {name} = {row.get(name)!r:.40}, not a whole number"
    if evaluation is not None and not evaluation["start"] <= row["index"] < evaluation["stop"]:
        return f"is about example {row['index']}, outside {evaluation['start']} to {evaluation['stop']}"
    return None


def _difference(there: Any, here: Any, path: Sequence[str] = ()) -> str | None:
    """The first field in which two descriptions differ, in words; None where they agree."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            found = _difference(there.get(key), here.get(key), [*path, str(key)])
            if found:
                return found
        return None
    there, here = (list(value) if isinstance(value, tuple) else value for value in (there, here))
    return None if there == here else f"{'.'.join(path)} is {there!r:.80} there and {here!r:.80} here"


def _stem(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9=,.+-]", "_", label)
