"""What was published: models with their evaluations and certificates, and RESULTS.md with its picture."""

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from menet.data import part_of
from menet.errors import ConfigurationError, RecordError
from menet.evaluation.accuracy import Accuracy, Images, accuracy, paired_difference
from menet.evaluation.certify import CertificateSummary, certificate_summary, certified_accuracies
from menet.evaluation.records import Records
from menet.evaluation.results import MODEL, read_certificates, read_results
from menet.progress import format_duration
from menet.report import Cell, Table
from menet.report.narrative import attack_words, interval, is_frozen, model_words, percent, tenth, threat_words

INTRODUCTION = (
    "Robust accuracy is the mean over fresh draws of the defense, which neither the attack nor its selection has "
    "seen (unless they are said to be fixed and scored on); intervals are 95 %, exact, over examples. Everything "
    "here is computed by `menet report` from the records beside this file."
)


@dataclass(frozen=True)
class Entry:
    """One model under one threat model: all that was measured, and the attack that decided."""

    name: str
    made: Mapping[str, Any]
    evaluations: tuple[Records, ...]
    """By robust accuracy, the lowest first."""
    frozen: tuple[Records, ...] = ()
    """Those of an attacker who knows the random draws, and on these alone."""

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
        # Where less of the dataset was there than its publishers have, so it was for the training.
        part = part_of(self.decisive.evaluation["dataset"])
        return training_words(self.made) + (f", part of the dataset ({part})" if part else "")


@dataclass(frozen=True)
class Proven:
    """One certificate of a model."""

    name: str
    made: Mapping[str, Any]
    records: Records

    @property
    def dataset(self) -> str:
        return str(self.records.evaluation["dataset"]["name"])

    @property
    def summary(self) -> CertificateSummary:
        return certificate_summary(self.records)

    @property
    def method(self) -> str:
        """Random masks with their p and probability of error, or partitions, which have none."""
        evaluation = self.records.evaluation
        if evaluation["partitions"]:
            cells = f" of {evaluation['cells']} cells" if "cells" in evaluation else ""
            return f"{evaluation['partitions']} partition{'s' * (evaluation['partitions'] > 1)}{cells}"
        return f"random masks, p {evaluation['p']:.3g}, α {evaluation['alpha']:g}"


def training_words(made: Mapping[str, Any]) -> str:
    """Objective, epochs, images and seed of the training, and its time."""
    config = made.get("config") or {}
    if not config:
        return "not recorded"
    words = [str(config.get("objective", "")), f"{config.get('epochs')} epochs"]
    if config.get("limit"):
        words.append(f"{config['limit']:,} images")
    if config.get("gradient") or (config.get("defense") or {}).get("gradient"):
        words.append(str(config.get("gradient") or config["defense"]["gradient"]))
    words.append(f"seed {config.get('seed')}")
    if made.get("seconds"):
        words.append(format_duration(made["seconds"]))
    return ", ".join(words)


def entries(folder: Path) -> list[Entry]:
    """All results in a folder, one entry per model and threat model, of a model the `main_threats` first."""
    found = []
    for name, evaluations in read_results(folder).items():
        made = made_of(folder / name / MODEL)
        threats: dict[str, list[Records]] = {}
        for records in evaluations.values():
            threats.setdefault(threat_words(records.evaluation), []).append(records)
        for group in threats.values():
            ranked = sorted(group, key=lambda one: (accuracy(one).value, one.label))
            fresh, frozen = (tuple(one for one in ranked if is_frozen(one) == kind) for kind in (False, True))
            if fresh:
                found.append(Entry(name, made, fresh, frozen))
    main = main_threats(found)
    return sorted(found, key=lambda one: (one.name, one.threat != main[one.dataset], _order(one)))


def main_threats(found: Sequence[Entry]) -> dict[str, str]:
    """The threat model under which the most models of each dataset were attacked."""
    count: dict[str, Counter[str]] = {}
    for entry in sorted(found, key=_order):
        count.setdefault(entry.dataset, Counter())[entry.threat] += 1
    return {dataset: threats.most_common(1)[0][0] for dataset, threats in count.items()}


def _order(entry: Entry) -> tuple[bool, str, float]:
    """By norm, ℓ∞ first, and budget."""
    threat = entry.decisive.evaluation.get("threat") or {}
    norm, size = str(threat.get("norm", "")), threat.get("epsilon")
    return norm != "linf", norm, float(size) if isinstance(size, (int, float)) else math.inf


def certificates(folder: Path) -> list[Proven]:
    """All certificates in a folder; those of a model by how many examples they are of, the most first."""
    return [
        Proven(name, made_of(folder / name / MODEL), records)
        for name, there in read_certificates(folder).items()
        for records in sorted(there.values(), key=lambda one: -len(one.rows))
    ]


def results_markdown(found: Sequence[Entry], proven: Sequence[Proven] = ()) -> str:
    """All results as tables: per dataset and threat model, then every attack and every certificate."""
    parts = ["# Results", INTRODUCTION]
    models: list[Entry | Proven] = [*found, *proven]
    for dataset in dict.fromkeys(one.dataset for one in models):
        parts.append(f"## {dataset}")
        group = [entry for entry in found if entry.dataset == dataset]
        by_budget = budgets_table(group)
        if by_budget.rows:
            parts += ["### By budget and norm", by_budget.markdown()]
        main = main_threats(group)
        ordered = sorted(group, key=lambda one: (one.threat not in main.values(), _order(one)))
        for threat in dict.fromkeys(entry.threat for entry in ordered):
            chosen = [entry for entry in group if entry.threat == threat]
            parts += [f"### {threat}", _overview(chosen).markdown()]
            parts += [_attacks(chosen).markdown()]
        if certified := [one for one in proven if one.dataset == dataset]:
            parts += ["### any change of a few pixels (ℓ0), proven", _proofs(certified).markdown()]
    used = [records for entry in found for records in (*entry.evaluations, *entry.frozen)]
    machines = sorted({_machine(records) for records in (*used, *(one.records for one in proven))})
    # Several defenses stand before one network: its training counts once.
    seconds = {str(one.made.get("config") or one.name): one.made.get("seconds") or 0.0 for one in models}
    attacked = sum(row.get("seconds", 0.0) for one in used for row in one.rows)
    proving = sum(row["seconds"] for one in proven for row in one.records.rows)
    parts += [
        "## How these were made",
        f"Training {format_duration(sum(seconds.values()))}, attacks {format_duration(attacked)}"
        + (f", certificates {format_duration(proving)}" if proven else "")
        + " in all. "
        + "; ".join(machines)
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def budgets_table(group: Sequence[Entry]) -> Table:
    """The models that were attacked under several threat models, one column for each of these."""
    count = Counter(entry.name for entry in group)
    several = sorted((entry for entry in group if count[entry.name] > 1), key=_order)
    threats = list(dict.fromkeys(entry.threat for entry in several))
    found = {(entry.name, entry.threat): _cell(entry.decisive, "adversarial", "expected") for entry in several}
    cells = tuple(
        (Cell(name), *(found.get((name, threat), Cell("–", number=True)) for threat in threats))
        for name in sorted({entry.name for entry in several})
    )
    return Table("Robust accuracy by budget and norm, worst case over attacks", ("model", *threats), cells)


def paired_table(found: Sequence[Entry], pairs: Sequence[tuple[str, str]]) -> Table:
    """Two models a row on the same images, each under the attack that decided for it."""
    main = main_threats(found)
    entry_of = {entry.name: entry for entry in found if entry.threat == main[entry.dataset]}
    rows = []
    for pair in pairs:
        missing = [name for name in pair if name not in entry_of]
        if missing:
            raise ConfigurationError(
                f"expected names of results, got {missing[0]!r}; there is {', '.join(entry_of)}"
            )
        one, other = (entry_of[name].decisive for name in pair)
        rows.append((Cell(pair[0]), Cell(pair[1]), *paired_cells(one, other, ("clean", "adversarial"))))
    columns = ("A", "B", "clean A %", "clean B %", "B - A", "robust A %", "robust B %", "B - A", "images")
    return Table("On the same images", columns, tuple(rows))


def paired_cells(one: Records, other: Records, kinds: Sequence[Images]) -> tuple[Cell, ...]:
    """Of each kind of images both accuracies and their difference, on the examples that both have; how many."""
    one, other = on_shared_examples(one, other)
    cells = []
    for images in kinds:
        gap = paired_difference(one, other, images)
        cells += [Cell(tenth(accuracy(each, images).value), number=True) for each in (one, other)]
        cells.append(Cell(f"{100 * gap.value:+.1f} ± {100 * gap.margin:.1f}", number=True))
    return (*cells, Cell(f"{len(one.rows):,}", number=True))


def on_shared_examples(one: Records, other: Records) -> tuple[Records, Records]:
    """The rows of the examples that both have."""
    shared = {row["index"] for row in one.rows} & {row["index"] for row in other.rows}
    first, second = (
        replace(records, rows=tuple(row for row in records.rows if row["index"] in shared))
        for records in (one, other)
    )
    return first, second


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
            Cell(f"{mean_of(records, 'queries'):,.0f}", number=True),
            Cell(f"{mean_of(records, 'gradients'):,.0f}", number=True),
            Cell(f"{len(records.rows):,} × {records.evaluation['scoring']['draws']}", number=True),
        )
        for entry in group
        for records in (*entry.evaluations, *entry.frozen)
    )
    columns = (
        "model", "attack", "robust", "by vote", "every draw", "forward passes", "backward passes",
        "examples × draws",
    )  # fmt: skip
    return Table("Every attack", columns, cells)


PIXELS = (1, 4, 8, 12)
"""At which certified accuracies are listed."""


def _proofs(group: Sequence[Proven]) -> Table:
    cells = []
    for one in sorted(group, key=lambda one: (-one.summary.median_radius, -one.summary.vote.value)):
        at, rows_ = certified_accuracies(one.records, PIXELS), one.records.rows
        cells.append(
            (
                Cell(one.name),
                Cell(model_words(one.records)),
                Cell(training_words(one.made)),
                Cell(one.method),
                _accuracy_cell(one.summary.vote),
                Cell(str(one.summary.median_radius), number=True),
                *(_accuracy_cell(at[pixels]) for pixels in PIXELS),
                Cell(f"{rows_[0]['index']}–{rows_[-1]['index']}", number=True),
            )
        )
    columns = (
        "model", "defense", "training", "by", "vote", "median radius",
        *(f"at {pixels} pixel{'s' * (pixels > 1)}" for pixels in PIXELS), "examples",
    )  # fmt: skip
    return Table("Certificates", columns, tuple(cells))


def attacks_picture(found: Sequence[Entry]) -> str:
    """Robust accuracy of one model under every attack it met, beside the same dataset's most robust other model.

    Shown is the model whose attacks differ most in what they find: what an evaluation says depends on its attack.
    Written as plain SVG, since the same records have to give the same bytes with every version of a library.
    """
    if not found:
        return _svg(60, [_text(24, 34, "no results yet", "note")])

    def spread(entry: Entry) -> float:
        return accuracy(entry.evaluations[-1]).value - accuracy(entry.decisive).value

    shown = max(found, key=lambda entry: (len(entry.evaluations) > 1, spread(entry)))
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
    for mark in range(0, 101, 20):
        x = SCALE_LEFT + SCALE_WIDTH * mark / 100
        parts.insert(0, f'<line x1="{x:.1f}" x2="{x:.1f}" y1="60" y2="{top - 26}" class="grid"/>')
        parts.append(_text(x, top - 8, str(mark), "note", 'text-anchor="middle"'))
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


def _cell(records: Records, images: Any, criterion: Any) -> Cell:
    return _accuracy_cell(accuracy(records, images, criterion))


def _accuracy_cell(found: Accuracy) -> Cell:
    return Cell(percent(found.value), interval(found), number=True)


def mean_of(records: Records, field: str) -> float:
    return sum(row.get(field, 0) for row in records.rows) / len(records.rows)


def made_of(path: Path) -> dict[str, Any]:
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
