"""Compact results: the rows of evaluations as compressed columns, small enough to commit.

`results/NAME/ATTACK.npz` holds what one attack did to one model, `results/NAME/certificate.npz` what is proven of
it, and `results/NAME/model.json` what was trained. Dropped are images and loss histories, and which draw gave
which answer: per example and kind of image only the first draw and the counts per class are kept. Every accuracy,
interval and comparison comes out the same.
"""

import json
import lzma
import math
import os
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from menet.errors import RecordError
from menet.evaluation import jsonl
from menet.evaluation.certify.votes import LABEL as CERTIFICATE
from menet.evaluation.records import Records, Row, verified
from menet.files import replacing, write_atomically

FORMAT = "menet.results/1"
MODEL = "model.json"
PAPER = "paper"
"""The folder of reproduced tables among results: records in it are of their cells, not of lines of the board."""
LARGEST = 2**26
"""Bytes of one file, unpacked, and draws in it, at most: a file from a stranger must not exhaust memory."""
DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, AttributeError, MemoryError, SyntaxError,
    tokenize.TokenError,
)  # fmt: skip
TOP = 5
KINDS = ("clean", "adversarial")
VIEW = "views."
"""Before the name of another way to score a model, in columns."""
NUMBERS: dict[str, type[np.number[Any]]] = {"linf": np.float32, "l2": np.float32, "l0": np.int32}
OPTIONAL: dict[str, type[np.number[Any]]] = {"queries": np.int64, "gradients": np.int64, "seconds": np.float32}
PROVEN: dict[str, type[np.number[Any]]] = {
    "prediction": np.int32, "votes": np.int32, "radius": np.int32, "lower_bound": np.float64,
    "runner_up": np.float64, "seconds": np.float32,
}  # fmt: skip
"""Of the rows of certificates, and what only some of them have."""
PROVEN_BY_SOME: dict[str, type[np.number[Any]]] = {
    "patch": np.int32, "processor_seconds": np.float32, "counts": np.uint32, "beaten": np.uint32,
}  # fmt: skip


def write_results(path: str | os.PathLike[str], records: Records) -> None:
    """Write the rows of one evaluation as columns; all of them must be there."""
    if records.missing or not records.rows:
        raise RecordError(f"expected all rows of {records.label!r}, got {len(records.missing)} missing")
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **_columns(records))  # type: ignore[arg-type]


def read_result(path: str | os.PathLike[str]) -> Records:
    """The records in one file that `write_results` wrote."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > LARGEST:
            raise RecordError(f"{path} unpacks to {unpacked:,} bytes, expected at most {LARGEST:,}")
        with np.load(path, allow_pickle=False) as columns:
            return _records(path, {name: columns[name] for name in columns.files})
    except RecordError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, OverflowError, *DAMAGE) as error:
        raise RecordError(f"{path} is not a file of results in the format {FORMAT}: {error}") from error


def read_results(folder: str | os.PathLike[str]) -> dict[str, dict[str, Records]]:
    """All results in a folder: by name of the model, then by label of the attack."""
    found: dict[str, dict[str, Records]] = {}
    for name, _, records in _each(folder):
        if records.label != CERTIFICATE:
            found.setdefault(name, {})[records.label] = records
    return found


def read_certificates(folder: str | os.PathLike[str]) -> dict[str, dict[str, Records]]:
    """All certificates in a folder of results: by name of the model, then by that of the file."""
    found: dict[str, dict[str, Records]] = {}
    for name, title, records in _each(folder):
        if records.label == CERTIFICATE:
            found.setdefault(name, {})[title] = records
    return found


def _each(folder: str | os.PathLike[str]) -> Iterator[tuple[str, str, Records]]:
    """Name of the model, name of the file and records of every result."""
    paths = [path for path in sorted(Path(folder).rglob("*.npz")) if path.relative_to(folder).parts[0] != PAPER]
    if not paths:
        raise RecordError(f"expected results (NAME/*.npz) in {folder}, found none")
    for path in paths:
        yield path.parent.relative_to(folder).as_posix(), path.stem, read_result(path)


def publish(
    name: str, evaluations: Mapping[str, Records], made: Mapping[str, Any], folder: str | os.PathLike[str]
) -> list[Path]:
    """Write the evaluations of a model to `folder`/`name`, with `made`, what it was trained by.

    Records of `certify` go by any title among them, such as `certificate`.
    """
    if not re.fullmatch(r"[a-z0-9]+([./-][a-z0-9]+)*", name):
        raise RecordError(f"expected a name of small letters, digits, '-' and '/', got {name!r}")
    target, written = Path(folder) / name, []
    for label, records in evaluations.items():
        path = target / f"{re.sub(r'[^A-Za-z0-9=,.+-]', '_', label)}.npz"
        # Where the model lay is nobody's business; its name and the digest of its weights say which it was.
        made_by = dict(records.header["made"])
        if "source" in made_by:
            made_by["source"] = Path(str(made_by["source"])).name
        write_results(path, replace(records, header={**records.header, "made": made_by}))
        written.append(path)
    config = made.get("config") or {}
    if config.get("prepared"):
        made = {**made, "config": {**config, "prepared": Path(str(config["prepared"])).name}}
    write_atomically(target / MODEL, json.dumps(made, indent=1, sort_keys=True) + "\n")
    return [*written, target / MODEL]


def _columns(records: Records) -> dict[str, np.ndarray]:
    rows, classes = records.rows, int(records.evaluation["dataset"]["classes"])
    members = sorted({row["member"] for row in rows if "member" in row})
    header = {"format": FORMAT, "header": records.header, "members": members}
    columns: dict[str, np.ndarray] = {
        "header": np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8),
        "index": np.array([row["index"] for row in rows], np.int32),
        "label": np.array([row["label"] for row in rows], np.int32),
    }
    for name in rows[0].get("seeds", ()):
        columns[f"seeds.{name}"] = np.array([row["seeds"][name] for row in rows], np.int64)
    if records.label == CERTIFICATE:
        for field, number in {**PROVEN, **PROVEN_BY_SOME}.items():
            if field in PROVEN or all(field in row for row in rows):
                columns[field] = np.array([row[field] for row in rows], number)
        return columns
    views = {f"{VIEW}{name}": name for name in rows[0].get("views", ())}
    for kind in (*KINDS, *views):
        scores = [row["views"][views[kind]] if kind in views else row[kind] for row in rows]
        columns[f"{kind}.counts"] = np.array(
            [np.bincount(one["predictions"], minlength=classes) for one in scores], np.uint32
        )
        columns[f"{kind}.first"] = np.array([one["predictions"][0] for one in scores], np.int32)
        columns[f"{kind}.top"] = np.array([sum(rank < TOP for rank in one["ranks"]) for one in scores], np.uint32)
        columns[f"{kind}.first_rank"] = np.array([one["ranks"][0] for one in scores], np.int32)
        for field in ("prediction", "rank", "probability"):
            kept = np.float32 if field == "probability" else np.int32
            columns[f"{kind}.mean.{field}"] = np.array([one["mean"][field] for one in scores], kept)
    for norm, number in NUMBERS.items():
        columns[f"perturbation.{norm}"] = np.array([row["perturbation"][norm] for row in rows], number)
    for field, number in OPTIONAL.items():
        if all(field in row for row in rows):
            columns[field] = np.array([row[field] for row in rows], number)
    for field in ("failed", "unusable_gradients"):
        columns[field] = np.array([row.get(field, False) for row in rows], bool)
    if members:
        columns["member"] = np.array([members.index(row["member"]) for row in rows], np.uint8)
    if all("image" in row for row in rows):
        columns["image"] = np.array([int(row["image"], 16) for row in rows], np.uint64)
    if all("restarts" in row for row in rows):
        columns["restarts"] = np.array([row["restarts"] for row in rows], np.uint16)
    return columns


def _records(path: Path, columns: Mapping[str, np.ndarray]) -> Records:
    content = json.loads(columns["header"].tobytes().decode(), parse_constant=jsonl.refuse)
    if content.get("format") != FORMAT:
        raise RecordError(f"expected the format {FORMAT}, got {content.get('format')!r:.40}")
    count = len(columns["index"])
    for name, column in columns.items():
        # Text of no characters takes no bytes, however many there are.
        if column.dtype.kind not in "biuf":
            raise ValueError(f"expected numbers as {name:.40}, got {column.dtype}")
        if name != "header" and len(column) != count:
            raise ValueError(f"expected columns of {count} examples, got {len(column)} of {name:.40}")
    proven = "radius" in columns
    if not proven:
        # Each draw that is counted becomes one number: a few bytes can count billions.
        counts = [columns[f"{kind}.counts"] for kind in (*KINDS, *_views(columns))]
        draws = sum(float(one.sum(dtype=np.float64)) for one in counts)
        if not draws <= LARGEST:
            raise ValueError(f"expected at most {LARGEST:,} draws, got {draws:,.0f}")
    plain = {name: column.tolist() for name, column in columns.items() if name != "header"}
    seeds = [name.removeprefix("seeds.") for name in plain if name.startswith("seeds.")]
    rows = [(_proven if proven else _row)(plain, row, seeds, content) for row in range(count)]
    found = _complete(verified(path, content["header"], rows))
    if proven != (found.label == CERTIFICATE):
        raise ValueError(f"expected the rows of {found.label!r:.40}, got others")
    return found


def _proven(plain: Mapping[str, list[Any]], row: int, seeds: Sequence[str], content: Mapping[str, Any]) -> Row:
    fields = ("index", "label", *PROVEN, *(field for field in PROVEN_BY_SOME if field in plain))
    found: Row = {field: plain[field][row] for field in fields}
    if found["radius"] < -1 or not math.isfinite(found["seconds"]):
        raise ValueError(f"expected a radius from -1 and finite seconds, got {found['radius']}")
    return found | ({"seeds": {name: plain[f"seeds.{name}"][row] for name in seeds}} if seeds else {})


def _complete(records: Records) -> Records:
    """`records`, if their header has all that a board is made of."""
    evaluation = records.evaluation
    needed: dict[str, tuple[str, ...]] = {"model": (), "seed": (), "dataset": ("name", "split")}
    if records.label == CERTIFICATE:
        needed |= {"p": (), "alpha": (), "partitions": ()}
    else:
        needed |= {"attack": ("kind",), "scoring": ("draws",)}
    for name, inner in needed.items():
        if name not in evaluation or not all(one in evaluation[name] for one in inner):
            raise ValueError(f"expected {' with '.join([name, *inner])} in its header")
    threat = evaluation.get("threat")
    if threat and not (threat.get("norm") in NUMBERS and "epsilon" in threat):
        raise ValueError(f"expected a threat model in one of {', '.join(NUMBERS)}, got {threat!r:.80}")
    if not records.rows:
        raise ValueError("expected at least one example, got none")
    return records


def _row(plain: Mapping[str, list[Any]], row: int, seeds: Sequence[str], content: Mapping[str, Any]) -> Row:
    label = plain["label"][row]
    found: Row = {
        "index": plain["index"][row],
        "label": label,
        **{kind: _scores(plain, row, kind, label) for kind in KINDS},
        "perturbation": {norm: plain[f"perturbation.{norm}"][row] for norm in NUMBERS},
        "seeds": {name: plain[f"seeds.{name}"][row] for name in seeds},
    }
    if views := _views(plain):
        found["views"] = {name: _scores(plain, row, kind, label) for kind, name in views.items()}
    for field in (*OPTIONAL, "failed", "unusable_gradients", "restarts"):
        if field in plain:
            found[field] = plain[field][row]
    if "member" in plain:
        found["member"] = content["members"][plain["member"][row]]
    if "image" in plain:
        found["image"] = f"{plain['image'][row]:016x}"
    return found


def _views(columns: Mapping[str, Any]) -> dict[str, str]:
    """The views among columns: their names by what their columns begin with."""
    found = (name.removesuffix(".counts") for name in columns if re.fullmatch(r"views\.[^.]+\.counts", name))
    return {kind: kind.removeprefix(VIEW) for kind in found}


def _scores(plain: Mapping[str, list[Any]], row: int, kind: str, label: int) -> dict[str, Any]:
    """Scores as a row holds them: the first draw first, the others by class."""
    first, first_rank = plain[f"{kind}.first"][row], plain[f"{kind}.first_rank"][row]
    counts = list(plain[f"{kind}.counts"][row])
    counts[first] -= 1
    others = [number for number, count in enumerate(counts) for _ in range(count)]
    # Of the draws that are wrong as many as there were have a rank among the first five.
    near = plain[f"{kind}.top"][row] - (first_rank < TOP) - sum(number == label for number in others)
    ranks, wrong = [first_rank], 0
    for number in others:
        wrong += number != label
        ranks.append(0 if number == label else 1 if wrong <= near else TOP)
    mean = {field: plain[f"{kind}.mean.{field}"][row] for field in ("prediction", "rank", "probability")}
    return {"predictions": [first, *others], "ranks": ranks, "mean": mean}
