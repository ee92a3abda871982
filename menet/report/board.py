"""The board and RESULTS.md: every published result, from the compact records alone.

Nothing is typed by hand: the same records give the same bytes, whenever they are rendered.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from menet import data
from menet.errors import MenetError, RecordError, require
from menet.evaluation.accuracy import accuracy
from menet.evaluation.provenance import of_image
from menet.evaluation.records import Records
from menet.evaluation.results import MODEL, read_results
from menet.files import write_atomically
from menet.progress import format_duration
from menet.report import Cell, Table
from menet.report.narrative import attack_words, interval, model_words, percent, threat_words

PICTURE = "attacks.svg"
FEWEST_EXAMPLES, FEWEST_DRAWS = 200, 20
"""For a line of the board."""
INTRODUCTION = (
    "Robust accuracy is the mean over fresh draws of the defense, which neither the attack nor its selection has "
    "seen; intervals are 95 %, exact, over examples. Everything here is computed by `menet report` from the "
    "records beside this file."
)


@dataclass(frozen=True)
class Entry:
    """One model under one threat model: all that was measured, and the attack that decided."""

    name: str
    made: Mapping[str, Any]
    evaluations: tuple[Records, ...]
    """By robust accuracy, the lowest first."""

    @property
    def decisive(self) -> Records:
        return self.evaluations[0]

    @property
    def threat(self) -> str:
        return threat_words(self.decisive.evaluation)

    @property
    def dataset(self) -> str:
        return str(self.decisive.evaluation["dataset"]["name"])

    @property
    def training(self) -> str:
        """Objective, epochs, images and seed of the training, and its time."""
        config = self.made.get("config") or {}
        if not config:
            return "not recorded"
        words = [str(config.get("objective", "")), f"{config.get('epochs')} epochs"]
        if config.get("limit"):
            words.append(f"{config['limit']:,} images")
        if config.get("gradient") or (config.get("defense") or {}).get("gradient"):
            words.append(str(config.get("gradient") or config["defense"]["gradient"]))
        words.append(f"seed {config.get('seed')}")
        if self.made.get("seconds"):
            words.append(format_duration(self.made["seconds"]))
        return ", ".join(words)


def entries(folder: Path) -> list[Entry]:
    """All results in a folder, one entry per model and threat model."""
    found = []
    for name, evaluations in read_results(folder).items():
        made = _made(folder / name / MODEL)
        threats: dict[str, list[Records]] = {}
        for records in evaluations.values():
            threats.setdefault(threat_words(records.evaluation), []).append(records)
        for group in threats.values():
            ranked = sorted(group, key=lambda one: (accuracy(one).value, one.label))
            found.append(Entry(name, made, tuple(ranked)))
    return found


def rows(found: Iterable[Entry]) -> list[dict[str, Any]]:
    """The lines of the board, in plain values."""
    return [_line(entry) for entry in found]


def write_board(folder: Path) -> list[Path]:
    """Write RESULTS.md, board.json, board.html and attacks.svg from the results in `folder`."""
    written = _rendered(entries(folder))
    for name, content in written.items():
        write_atomically(folder / name, content)
    return [folder / name for name in written]


def _rendered(found: Sequence[Entry]) -> dict[str, str]:
    lines = rows(found)
    return {
        "RESULTS.md": results_markdown(found),
        "board.json": json.dumps(lines, indent=1, ensure_ascii=False, sort_keys=True) + "\n",
        "board.html": _page(lines),
        PICTURE: attacks_picture(found),
    }


def problems(folder: Path) -> list[str]:
    """Why these results should not be merged: what a reviewer of a new line of the board would find.

    Each model needs the standard suite on enough examples and draws, perturbations within their budget, examples
    of the dataset itself where it is installed, and what it was trained by; the board must be the one that the
    records give.
    """
    found = []
    for name, evaluations in read_results(folder).items():
        if not _made(folder / name / MODEL):
            found.append(f"{name}: expected {MODEL} with what the model was trained by")
        if not any(one.evaluation["attack"]["kind"] == "Standard" for one in evaluations.values()):
            found.append(f"{name}: expected the attack standard; run `menet evaluate … --attacks standard`")
        found += [f"{name}, {label}: {why}" for label, one in evaluations.items() for why in _doubts(one)]
    written = _rendered(entries(folder))
    for name, content in written.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            found.append(f"{name}: expected what `menet report {folder}` writes")
    return found


def _doubts(records: Records) -> list[str]:
    found, evaluation = [], records.evaluation
    if len(records.rows) < FEWEST_EXAMPLES and evaluation["attack"]["kind"] == "Standard":
        found.append(f"expected at least {FEWEST_EXAMPLES} examples, got {len(records.rows)}")
    draws = evaluation["scoring"]["draws"]
    if 1 < draws < FEWEST_DRAWS:  # A deterministic model is scored on one.
        found.append(f"expected at least {FEWEST_DRAWS} draws, got {draws}")
    threat = evaluation.get("threat")
    if threat and isinstance(threat["epsilon"], (int, float)):
        beyond = [
            row["index"] for row in records.rows
            if row["perturbation"][threat["norm"]] > threat["epsilon"] * (1 + 1e-4) + 1e-6
        ]  # fmt: skip
        if beyond:
            found.append(f"expected perturbations within the budget, got {len(beyond)} beyond it ({beyond[:3]})")
    return found + _strangers(records)


def _strangers(records: Records) -> list[str]:
    """Examples that are not those of the dataset, as far as it is installed."""
    described = records.evaluation["dataset"]
    try:
        dataset = data.load(described["name"], described["split"])
        chosen = [row for row in records.rows if "image" in row][:: max(1, len(records.rows) // 20)]
        for row in chosen:
            images, labels = dataset.batch(slice(row["index"], row["index"] + 1))
            if int(labels[0]) != row["label"] or of_image(images[0]) != row["image"]:
                return [f"example {row['index']} is not that of the dataset {described['name']}"]
    except MenetError:
        return []
    return []


def results_markdown(found: Sequence[Entry]) -> str:
    """All results as tables: per dataset and threat model, then every attack."""
    parts = ["# Results", INTRODUCTION]
    for dataset in dict.fromkeys(entry.dataset for entry in found):
        parts.append(f"## {dataset}")
        group = [entry for entry in found if entry.dataset == dataset]
        for threat in dict.fromkeys(entry.threat for entry in group):
            chosen = [entry for entry in group if entry.threat == threat]
            parts += [f"### {threat}", _overview(chosen).markdown()]
            parts += [_attacks(chosen).markdown()]
    machines = sorted({_machine(records) for entry in found for records in entry.evaluations})
    seconds = {entry.name: entry.made.get("seconds") or 0.0 for entry in found}
    attacked = sum(row.get("seconds", 0.0) for entry in found for one in entry.evaluations for row in one.rows)
    parts += [
        "## How these were made",
        f"Training {format_duration(sum(seconds.values()))}, attacks {format_duration(attacked)} in all. "
        + "; ".join(machines)
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _overview(group: Sequence[Entry]) -> Table:
    cells = tuple(
        (
            Cell(entry.name),
            Cell(model_words(entry.decisive)),
            Cell(entry.training),
            _cell(entry.decisive, "clean", "expected"),
            _cell(entry.decisive, "adversarial", "expected"),
            _cell(entry.decisive, "adversarial", "vote"),
            Cell(attack_words(entry.decisive)),
            Cell(f"{len(entry.decisive.rows):,}", number=True),
        )
        for entry in sorted(group, key=lambda one: -accuracy(one.decisive).value)
    )
    columns = ("model", "defense", "training", "clean", "robust", "by vote", "attack that decided", "examples")
    return Table("Worst case over attacks", columns, cells)


def _attacks(group: Sequence[Entry]) -> Table:
    cells = tuple(
        (
            Cell(entry.name),
            Cell(attack_words(records), records.label),
            _cell(records, "adversarial", "expected"),
            _cell(records, "adversarial", "vote"),
            _cell(records, "adversarial", "worst"),
            Cell(f"{_mean(records, 'queries'):,.0f}", number=True),
            Cell(f"{_mean(records, 'gradients'):,.0f}", number=True),
            Cell(f"{len(records.rows):,} × {records.evaluation['scoring']['draws']}", number=True),
        )
        for entry in group
        for records in entry.evaluations
    )
    columns = (
        "model", "attack", "robust", "by vote", "every draw", "forward passes", "backward passes",
        "examples × draws",
    )  # fmt: skip
    return Table("Every attack", columns, cells)


def attacks_picture(found: Sequence[Entry]) -> str:
    """Robust accuracy of one model under every attack it met, beside the same dataset's most robust other model.

    Shown is the model whose attacks differ most in what they find: what an evaluation says depends on its attack.
    Written as plain SVG, since the same records have to give the same bytes with every version of a library.
    """
    if not found:
        return _svg(60, [_text(24, 34, "no results yet", "note")])
    spread = {
        entry.name: accuracy(entry.evaluations[-1]).value - accuracy(entry.decisive).value for entry in found
    }
    shown = max(found, key=lambda entry: (len(entry.evaluations) > 1, spread[entry.name]))
    rivals = [
        entry for entry in found
        if entry is not shown and (entry.dataset, entry.threat) == (shown.dataset, shown.threat)
    ]  # fmt: skip
    best = max(rivals, key=lambda entry: accuracy(entry.decisive).value, default=None)
    parts, top = [], 30
    for entry, lines in ((shown, shown.evaluations[::-1]), *(((best, (best.decisive,)),) if best else ())):
        title = f"{model_words(entry.decisive)}, {entry.training.split(',')[0]} training"
        parts.append(_text(24, top, title, "title"))
        parts.append(_text(24, top + 18, f"{entry.name}: {entry.dataset}, {entry.threat}", "note"))
        top += 44
        for records in lines:
            number = accuracy(records)
            worst = "worst" if records is entry.decisive else "other"
            low, at, high = (SCALE_LEFT + SCALE_WIDTH * x for x in (number.low, number.value, number.high))
            parts += [
                _text(24, top + 4, attack_words(records), worst),
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{top}" y2="{top}" class="{worst}"/>',
                f'<circle cx="{at:.1f}" cy="{top}" r="5" class="{worst}"/>',
                _text(SCALE_LEFT + SCALE_WIDTH + 62, top + 4, percent(number.value), worst, 'text-anchor="end"'),
            ]
            top += 26
        top += 22
    for tenth in range(0, 11, 2):
        x = SCALE_LEFT + SCALE_WIDTH * tenth / 10
        parts.insert(0, f'<line x1="{x:.1f}" x2="{x:.1f}" y1="60" y2="{top - 26}" class="grid"/>')
        parts.append(_text(x, top - 8, f"{10 * tenth}", "note", 'text-anchor="middle"'))
    parts.append(_text(SCALE_LEFT, top + 12, "robust accuracy in %, 95 % interval over examples", "note"))
    return _svg(top + 28, parts)


SCALE_LEFT, SCALE_WIDTH = 352, 280
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.title{font-weight:600}.note{fill:#767676;font-size:12px}"
    "text.worst{font-weight:600;fill:#b3261e}line{stroke-width:2.5}line.worst{stroke:#b3261e}line.other{stroke:#5b7fa6}"
    "circle.worst{fill:#b3261e}circle.other{fill:#5b7fa6}line.grid{stroke:#e4e4e4;stroke-width:1}"
)


def _svg(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height:.0f}" role="img" '
        f'aria-label="Robust accuracy by attack">\n<style>{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" {more}>{html.escape(words)}</text>'


def _line(entry: Entry) -> dict[str, Any]:
    decisive = entry.decisive
    frozen = [one for one in entry.evaluations if one.evaluation.get("fixed_draws")]
    measured = {
        "clean": ("clean", "expected"),
        "robust": ("adversarial", "expected"),
        "vote": ("adversarial", "vote"),
        "worst_draw": ("adversarial", "worst"),
    }
    numbers = {name: _number(decisive, *what) for name, what in measured.items()}
    return {
        "name": entry.name,
        "dataset": entry.dataset,
        "threat": entry.threat,
        "defense": model_words(decisive),
        "training": entry.training,
        **numbers,
        "fixed_draws": min((_number(one, "adversarial", "expected") for one in frozen), default=None, key=_value),
        "attack": attack_words(decisive),
        "attacks": len(entry.evaluations),
        "forward": round(_mean(decisive, "queries")),
        "backward": round(_mean(decisive, "gradients")),
        "examples": len(decisive.rows),
        "draws": decisive.evaluation["scoring"]["draws"],
        "seed": decisive.evaluation["seed"],
        "rows": entry.name,
        "every": [
            {
                "attack": attack_words(one),
                "label": one.label,
                "robust": _number(one, "adversarial", "expected"),
                "vote": _number(one, "adversarial", "vote"),
                "forward": round(_mean(one, "queries")),
                "backward": round(_mean(one, "gradients")),
                "examples": len(one.rows),
            }
            for one in entry.evaluations
        ],
    }


def _value(number: Mapping[str, float]) -> float:
    return number["value"]


def _number(records: Records, images: Any, criterion: Any) -> dict[str, float]:
    found = accuracy(records, images, criterion)
    return {"value": round(found.value, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def _cell(records: Records, images: Any, criterion: Any) -> Cell:
    found = accuracy(records, images, criterion)
    return Cell(percent(found.value), interval(found), number=True)


def _mean(records: Records, field: str) -> float:
    return sum(row.get(field, 0) for row in records.rows) / len(records.rows)


def _made(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(made, dict):
        return {}
    config, seconds = made.get("config") or {}, made.get("seconds") or 0
    whole = isinstance(config, dict) and isinstance(config.get("defense") or {}, dict)
    numbers = (seconds, (config.get("limit") or 0) if whole else None)
    if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in numbers):
        raise RecordError(f"expected a training's config and seconds in {path}, got {made!r:.80}")
    return made


def _machine(records: Records) -> str:
    made = records.header.get("made", {})
    versions = ", ".join(f"{name} {version}" for name, version in sorted(made.get("versions", {}).items()))
    return f"{made.get('processor', 'unknown processor')}, Python {made.get('python')}, {versions}"


def _page(lines: Sequence[Mapping[str, Any]]) -> str:
    jinja2 = require("jinja2", extra="report")
    environment = jinja2.Environment(loader=jinja2.PackageLoader("menet.report", "."), autoescape=True)
    # Inside a script element only "</" could end it early.
    content = json.dumps(list(lines), ensure_ascii=False, sort_keys=True).replace("<", "\\u003c")
    template = environment.get_template("board.html.jinja")
    return str(template.render(content=content, introduction=INTRODUCTION.replace("`", "")))
