"""From finished jobs to the numbers of a table or figure: pure functions of records, kept as JSON."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from menet.errors import RecordError
from menet.evaluation import Accuracy, Records, accuracy, certified_accuracies, restart_accuracies
from menet.evaluation.accuracy import Images
from menet.experiments.jobs import Certify, Evaluate, Places
from menet.experiments.measures import Cost, Measurement
from menet.experiments.plan import VOTES, Cell, Figure, Panel, Plan, Table
from menet.experiments.runner import Outcome, finished
from menet.experiments.scale import Scale
from menet.files import write_atomically

FORMAT = "menet.reproduction/1"


def summarise(plan: Plan, scale: Scale, places: Places, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """What was measured of a plan (already at `scale`), beside what the paper claims."""
    common = {
        "format": FORMAT,
        "name": plan.name,
        "title": plan.title,
        "label": plan.label,
        "note": plan.note,
        "scale": scale.name,
        "scale_summary": scale.summary,
    }
    if isinstance(plan, Table):
        return {**common, "kind": "table", "cells": [_cell(plan, cell, places, outcomes) for cell in plan.cells]}
    panels = [_panel(plan, panel, places, outcomes) for panel in plan.panels]
    return {**common, "kind": "figure", "form": plan.form, "across": plan.across, "panels": panels}


def keep(result: dict[str, Any], places: Places) -> Path:
    """Write a summary where `kept` finds it."""
    path = result_path(places, result["scale"], result["name"])
    write_atomically(path, json.dumps(result, indent=1, ensure_ascii=False))
    return path


def kept(places: Places, scale: str, name: str) -> dict[str, Any] | None:
    """The summary that was written for an experiment, if there is one."""
    path = result_path(places, scale, name)
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if found.get("format") != FORMAT:
        raise RecordError(f"{path} has the format {found.get('format')!r:.40}; accepted is {FORMAT}")
    return found


def result_path(places: Places, scale: str, name: str) -> Path:
    """Where the summary of an experiment is."""
    return places.root / "results" / scale / f"{name}.json"


def _cell(table: Table, cell: Cell, places: Places, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    claim = table.claim(cell)
    return {
        "row": cell.row,
        "column": cell.column,
        "ours": cell.ours,
        "claimed": claim.value if claim else None,
        "quoted": claim.quoted if claim else False,
        **measured(cell, places, outcomes),
    }


def measured(cell: Cell, places: Places, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The number of a cell with its interval, in percent (milliseconds for cost), or why there is none."""
    job = cell.job
    start: dict[str, Any] = {"job": f"{job.kind}/{job.key[:20]}", "does": job.title()}
    if finished(job, places) is None:
        outcome = outcomes.get(job.key)
        return {**start, "missing": outcome.message if outcome else "not run yet"}
    if isinstance(job, Cost):
        return {**start, "unit": "ms", "value": 1000 * job.result(places)["seconds"]}
    number = _accuracy(cell, job, job.records(places))
    return {
        **start,
        "unit": "%",
        "value": 100 * number.value,
        "low": 100 * number.low,
        "high": 100 * number.high,
        "examples": number.examples,
        "interval": number.interval,
        "dataset": job.model.config.dataset,
    }


def _accuracy(cell: Cell, job: Evaluate | Certify, records: Records) -> Accuracy:
    if isinstance(job, Certify):
        radius = cell.radius or 0
        return certified_accuracies(records, [radius])[radius]
    if cell.criterion == "hard":
        return restart_accuracies(records)[0]
    images: Images = "clean" if cell.clean else "adversarial"
    if cell.criterion == "vote":
        records = replace(records, rows=tuple(_first(row, VOTES) for row in records.rows))
        return accuracy(records, images, "vote", cell.top)
    return accuracy(records, images, "expected", cell.top)


def _first(row: dict[str, Any], masks: int) -> dict[str, Any]:
    """A row as if it had been scored on its first so many masks; the paper votes with ten."""
    return {
        **row,
        **{
            images: {**row[images], **{name: row[images][name][:masks] for name in ("predictions", "ranks")}}
            for images in ("clean", "adversarial")
        },
    }


def _panel(figure: Figure, panel: Panel, places: Places, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    curves = [
        {"name": name, "points": [{"x": one.x, **measured(one.cell, places, outcomes)} for one in points]}
        for name, points in panel.curves
    ]
    sources: dict[str, Any] = {}
    for name, job in panel.sources:
        if finished(job, places) is None:
            outcome = outcomes.get(job.key)
            sources[name] = {"missing": outcome.message if outcome else "not run yet"}
        elif isinstance(job, Measurement):
            sources[name] = job.result(places)
        else:
            # Vectors and images stay where they are; a report reads them there.
            sources[name] = {"folder": str(places.ready(job).relative_to(places.root))}
    return {"title": panel.title, "curves": curves, "sources": sources}
