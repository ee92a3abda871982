"""The board, a page of every published result, and what a reviewer of a new line would object to.

Nothing is typed by hand: the same records give the same bytes, whenever they are rendered.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from menet import data
from menet.errors import MenetError, require
from menet.evaluation.accuracy import Accuracy, accuracy
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.provenance import of_image
from menet.evaluation.records import Records
from menet.evaluation.results import MODEL, read_results
from menet.files import write_atomically
from menet.report.narrative import attack_words, model_words
from menet.report.results import (
    INTRODUCTION,
    Entry,
    Proven,
    attacks_picture,
    certificates,
    entries,
    made_of,
    main_threats,
    mean_of,
    results_markdown,
    training_words,
)

PICTURE = "attacks.svg"

FEWEST_EXAMPLES, FEWEST_DRAWS = 200, 20
"""For a line of the board."""


def rows(found: Sequence[Entry], proven: Sequence[Proven] = ()) -> list[dict[str, Any]]:
    """The lines of the board, in plain values: models that were attacked, then those that are only certified."""
    largest, main = {one.name: one for one in reversed(proven)}, main_threats(found)
    lines = [{**_line(entry), "usual": entry.threat == main[entry.dataset]} for entry in found]
    for line in lines:
        line["certificate"] = _certificate(largest[line["name"]]) if line["name"] in largest else None
    attacked = {entry.name for entry in found}
    return lines + [_proven_line(one) for name, one in sorted(largest.items()) if name not in attacked]


def write_board(folder: Path) -> list[Path]:
    """Write RESULTS.md, board.json, board.html and attacks.svg from the results in `folder`."""
    written = _rendered(entries(folder), certificates(folder))
    for name, content in written.items():
        write_atomically(folder / name, content)
    return [folder / name for name in written]


def _rendered(found: Sequence[Entry], proven: Sequence[Proven]) -> dict[str, str]:
    lines = rows(found, proven)
    return {
        "RESULTS.md": results_markdown(found, proven),
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
    found, proven = [], certificates(folder)
    evaluated = read_results(folder)
    for name in sorted({*evaluated, *(one.name for one in proven)}):
        if not made_of(folder / name / MODEL):
            found.append(f"{name}: expected {MODEL} with what the model was trained by")
    found += [f"{one.name}, certificate: {why}" for one in proven for why in _strangers(one.records)]
    for name, evaluations in evaluated.items():
        if not any(one.evaluation["attack"]["kind"] == "Standard" for one in evaluations.values()):
            found.append(f"{name}: expected the attack standard; run `menet evaluate … --attacks standard`")
        found += [f"{name}, {label}: {why}" for label, one in evaluations.items() for why in _doubts(one)]
    written = _rendered(entries(folder), proven)
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
        for row in records.rows[:: max(1, len(records.rows) // 20)]:
            images, labels = dataset.batch(slice(row["index"], row["index"] + 1))
            # Certificates have no digests of their images.
            if int(labels[0]) != row["label"] or of_image(images[0]) != row.get("image", of_image(images[0])):
                return [f"example {row['index']} is not that of the dataset {described['name']}"]
    except MenetError:
        return []
    return []


def _line(entry: Entry) -> dict[str, Any]:
    decisive = entry.decisive
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
        "frozen": _number(entry.frozen[0], "adversarial", "expected") if entry.frozen else None,
        "attack": attack_words(decisive),
        "attacks": len(entry.evaluations),
        "forward": round(mean_of(decisive, "queries")),
        "backward": round(mean_of(decisive, "gradients")),
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
                "forward": round(mean_of(one, "queries")),
                "backward": round(mean_of(one, "gradients")),
                "examples": len(one.rows),
            }
            for one in (*entry.evaluations, *entry.frozen)
        ],
    }


def _certificate(one: Proven) -> dict[str, Any]:
    """A certificate in plain values."""
    summary = one.summary
    return {
        "method": one.method,
        "median_radius": summary.median_radius,
        "vote": _plain(summary.vote),
        "examples": len(one.records.rows),
        "curve": {str(at): _plain(found) for at, found in certified_accuracies(one.records).items()},
    }


def _proven_line(one: Proven) -> dict[str, Any]:
    """The line of a model that is certified, and that nobody has attacked."""
    vote = one.summary.vote
    return {
        "name": one.name,
        "dataset": one.dataset,
        "threat": "ℓ0, proven",
        "usual": True,
        "defense": model_words(one.records),
        "training": training_words(one.made),
        **dict.fromkeys(("robust", "vote", "worst_draw", "frozen")),
        "clean": _plain(vote),
        "certificate": _certificate(one),
        "attack": "none",
        "attacks": 0,
        "forward": round(one.summary.draws),
        "backward": 0,
        "examples": len(one.records.rows),
        "draws": 1,
        "seed": one.records.evaluation["seed"],
        "rows": one.name,
        "every": [],
    }


def _number(records: Records, images: Any, criterion: Any) -> dict[str, float]:
    return _plain(accuracy(records, images, criterion))


def _plain(found: Accuracy) -> dict[str, float]:
    return {"value": round(found.value, 6), "low": round(found.low, 6), "high": round(found.high, 6)}


def _page(lines: Sequence[Mapping[str, Any]]) -> str:
    jinja2 = require("jinja2", extra="report")
    environment = jinja2.Environment(loader=jinja2.PackageLoader("menet.report", "."), autoescape=True)
    # Inside a script element only "</" could end it early.
    content = json.dumps(list(lines), ensure_ascii=False, sort_keys=True).replace("<", "\\u003c")
    template = environment.get_template("board.html.jinja")
    return str(template.render(content=content, introduction=INTRODUCTION.replace("`", "")))
