"""Read everything in a folder that a report is made of: records, certificates, audits, features, notes."""

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from menet.errors import MenetError, RecordError
from menet.evaluation.certify import LABEL as CERTIFICATE
from menet.evaluation.records import Records, read_folder
from menet.evaluation.snapshots import FEATURES_SUFFIX, Features, load_features

NOTES = "report.json"
RECONSTRUCTION = "reconstruction.png"
KEPT_APART = ("evaluation", "records")
"""Folders of records inside the folder of a model, which gives the model its name."""


@dataclass(frozen=True)
class Subject:
    """One model and everything measured on it."""

    name: str
    evaluations: dict[str, Records] = field(default_factory=dict)
    certificate: Records | None = None
    audit: dict[str, Any] | None = None
    features: tuple[Features, ...] = ()

    @property
    def records(self) -> list[Records]:
        """All records of the model."""
        return [*self.evaluations.values(), *([self.certificate] if self.certificate else [])]


@dataclass(frozen=True)
class PaperNumber:
    """A number from the paper, shown beside ours and never mixed with them."""

    model: str
    attack: str
    """The label of the attack, or `clean`."""
    accuracy: float
    """From 0 to 1."""
    where: str = ""


@dataclass(frozen=True)
class Notes:
    """What people wrote about the numbers; nothing in it is measured."""

    title: str = ""
    introduction: tuple[str, ...] = ()
    meaning: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    """Folder of a model, relative to that of the report → its name in tables, in the order of the tables."""
    paper: tuple[PaperNumber, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Collection:
    """Everything a report is made of."""

    folder: Path
    subjects: tuple[Subject, ...]
    notes: Notes
    reconstruction: bytes | None = None

    @property
    def damage(self) -> list[str]:
        """Every damaged line."""
        return [fault for subject in self.subjects for records in subject.records for fault in records.damage]


def collect(
    folder: str | os.PathLike[str], *, damaged: bool = False, notes: str | os.PathLike[str] | None = None
) -> Collection:
    """Read everything under `folder`; a model is a folder with records, or with `evaluation/` that has them.

    `notes` replaces the folder's own file of notes; `damaged` skips damaged lines, which are listed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"expected a folder of records, got {folder}; there is no such folder")
    if notes is not None and not Path(notes).is_file():
        raise RecordError(f"expected a file of notes, got {notes}; there is no such file")
    told = read_notes(folder / NOTES if notes is None else Path(notes))
    found = {path.parent for path in folder.rglob("*.rank*.jsonl") if path.stat().st_size}
    found |= {path.parent for path in folder.rglob("audit.json")}
    groups: dict[Path, list[Path]] = {}
    for place in sorted(found):
        plain = place.name in KEPT_APART or place.name.partition("-")[0] == CERTIFICATE
        owner = place.parent if plain and place != folder else place
        groups.setdefault(owner, []).append(place)
    if not groups:
        raise RecordError(
            f"expected records (*.rank*.jsonl) or audit.json in {folder}, found none; run menet evaluate or audit"
        )
    subjects = [_subject(folder, owner, places, told, damaged) for owner, places in groups.items()]
    order = list(told.names.values())
    subjects.sort(key=lambda one: order.index(one.name) if one.name in order else len(order))
    picture = folder / RECONSTRUCTION
    return Collection(folder, tuple(subjects), told, picture.read_bytes() if picture.is_file() else None)


@contextmanager
def showing(folder: Path) -> Iterator[None]:
    """End in one line where records with valid checksums hold what no table or figure can be made of."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, MenetError):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RecordError(
            f"expected records that menet wrote in {folder}, got some that cannot be shown: "
            f"{type(error).__name__}: {error!s:.120} ({Path(place.filename).name}:{place.lineno})"
        ) from error


def evaluations_of(folder: Path) -> dict[str, Records]:
    """The records of a model by attack, in its run folder or in the folder that has them."""
    for place in (folder, *(folder / name for name in KEPT_APART)):
        if any(place.glob("*.rank*.jsonl")):
            found = read_folder(place)
            return {label: records for label, records in found.items() if label != CERTIFICATE}
    raise RecordError(f"expected a run or a folder of records, got {folder}, which has none; run menet evaluate")


def read_notes(path: Path) -> Notes:
    """The notes in `path`, or empty ones if there is no such file."""
    if not path.is_file():
        return Notes()
    try:
        content = json.loads(path.read_bytes())
        seconds = content.get("seconds")
        paper = tuple(PaperNumber(**one) for one in content.get("paper", ()))
        if not all(isinstance(one, int | float) for one in (seconds or 0, *(one.accuracy for one in paper))):
            raise ValueError("seconds and accuracies are numbers")
        return Notes(
            title=str(content.get("title", "")),
            introduction=tuple(map(str, content.get("introduction", ()))),
            meaning=tuple(map(str, content.get("meaning", ()))),
            names={str(key): str(value) for key, value in content.get("names", {}).items()},
            paper=paper,
            seconds=seconds,
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"expected the notes of a report in {path}: {error}") from error


def _subject(folder: Path, owner: Path, places: list[Path], notes: Notes, damaged: bool) -> Subject:
    relative = owner.relative_to(folder).as_posix()
    evaluations: dict[str, Records] = {}
    certificate: Records | None = None
    audit: dict[str, Any] | None = None
    features: list[Features] = []
    for place in places:
        if any(place.glob("*.rank*.jsonl")):
            there = read_folder(place, damaged=damaged)
            certificate = there.pop(CERTIFICATE, certificate)
            evaluations.update({label: _complete(one, place) for label, one in there.items() if one.rows})
        if (place / "audit.json").is_file():
            audit = _read_audit(place / "audit.json")
        features += [load_features(path) for path in sorted(place.glob(f"*{FEATURES_SUFFIX}"))]
    if certificate is not None and not certificate.rows:
        certificate = None
    evaluations = dict(sorted(evaluations.items(), key=lambda pair: _strength(pair[1])))
    name = notes.names.get(relative, folder.resolve().name if relative == "." else relative)
    return Subject(name, evaluations, certificate, audit, tuple(features))


def _complete(records: Records, place: Path) -> Records:
    """`records`, if their header has all that tables and figures are made of."""
    for name in ("model", "dataset", "attack", "scoring", "seed"):
        if name not in records.evaluation:
            raise RecordError(f"expected {name!r} in the header of the records of {records.label!r} in {place}")
    for name, inner in (("dataset", "name"), ("dataset", "split"), ("attack", "kind"), ("scoring", "draws")):
        if inner not in records.evaluation[name]:
            raise RecordError(f"expected '{name}.{inner}' in the header of {records.label!r} in {place}")
    return records


def _strength(records: Records) -> tuple[Any, ...]:
    """The order in tables: transfer attacks first, then by epsilon, draws per gradient and steps."""
    attack = records.evaluation["attack"]
    inner = attack["attack"] if isinstance(attack.get("attack"), dict) else attack
    epsilon = (records.evaluation.get("threat") or {}).get("epsilon")
    size = float(epsilon) if isinstance(epsilon, (int, float)) else float("inf")
    return (
        attack.get("kind") != "Transfer",
        size,
        int(inner.get("eot") or 1),
        int(inner.get("steps") or 0),
        records.label,
    )


def _read_audit(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        for finding in content["findings"]:
            words = [finding[name] for name in ("name", "status", "meaning")]
            if not all(isinstance(one, str) for one in words) or not isinstance(finding["numbers"], dict):
                raise ValueError("a finding has no name, status, meaning or numbers of the right type")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"expected an audit in {path}: {error}") from error
    return dict(content)
