"""From finished jobs to the numbers of a table or figure: pure functions of records, saved as JSON summaries."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from menet.errors import RecordError
from menet.evaluation import Accuracy, Records, accuracy, certified_accuracies, restart_accuracies
from menet.evaluation.accuracy import Images
from menet.experiments.jobs import Certify, Evaluate, Workspace
from menet.experiments.measures import Measurement, Timing
from menet.experiments.plan import VOTES, Cell, Experiment, Panel, Table
from menet.experiments.runner import JobOutcome, finished
from menet.experiments.scale import Scale
from menet.files import write_atomically

FORMAT = "menet.reproduction/1"


def summarize(
    experiment: Experiment, scale: Scale, workspace: Workspace, outcomes: Mapping[str, JobOutcome]
) -> dict[str, Any]:
    """What was measured for an experiment (already at `scale`), next to what the paper claims."""
    common = {
        "format": FORMAT,
        "name": experiment.name,
        "title": experiment.title,
        "label": experiment.label,
        "note": experiment.note,
        "scale": scale.name,
        "scale_summary": scale.summary,
    }
    if isinstance(experiment, Table):
        return {
            **common,
            "kind": "table",
            "cells": [_cell(experiment, cell, workspace, outcomes) for cell in experiment.cells],
        }
    panels = [_panel(panel, workspace, outcomes) for panel in experiment.panels]
    return {**common, "kind": "figure", "form": experiment.form, "across": experiment.across, "panels": panels}


def save_summary(summary: dict[str, Any], workspace: Workspace) -> Path:
    """Write a summary where `load_summary` finds it."""
    path = summary_path(workspace, summary["scale"], summary["name"])
    write_atomically(path, json.dumps(summary, indent=1, ensure_ascii=False))
    return path


def load_summary(workspace: Workspace, scale: str, name: str) -> dict[str, Any] | None:
    """The saved summary of an experiment, or None."""
    path = summary_path(workspace, scale, name)
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RecordError(f"expected JSON in {path}: {error}") from error
    if found.get("format") != FORMAT:
        raise RecordError(f"expected {path} to have the format {FORMAT}, got {found.get('format')!r:.40}")
    return found


def summary_path(workspace: Workspace, scale: str, name: str) -> Path:
    """The path of an experiment's summary."""
    return workspace.root / "results" / scale / f"{name}.json"


def _cell(table: Table, cell: Cell, workspace: Workspace, outcomes: Mapping[str, JobOutcome]) -> dict[str, Any]:
    claim = table.claim(cell)
    return {
        "row": cell.row,
        "column": cell.column,
        "ours": cell.ours,
        "claimed": claim.value if claim else None,
        "quoted": claim.quoted if claim else False,
        **measured(cell, workspace, outcomes),
    }


def measured(cell: Cell, workspace: Workspace, outcomes: Mapping[str, JobOutcome]) -> dict[str, Any]:
    """The number of a cell with its interval, in percent (milliseconds for timings), or why there is none."""
    job = cell.job
    start: dict[str, Any] = {"job": f"{job.kind}/{job.key[:20]}", "does": job.title()}
    if finished(job, workspace) is None:
        outcome = outcomes.get(job.key)
        return {**start, "missing": outcome.message if outcome else "not run yet"}
    if isinstance(job, Timing):
        return {**start, "unit": "ms", "value": 1000 * job.result(workspace)["seconds"]}
    number = _accuracy(cell, job, job.records(workspace))
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


def _first(row: dict[str, Any], draws: int) -> dict[str, Any]:
    """A record as if it had been scored on its first `draws` draws alone."""
    return {
        **row,
        **{
            images: {**row[images], **{name: row[images][name][:draws] for name in ("predictions", "ranks")}}
            for images in ("clean", "adversarial")
        },
    }


def _panel(panel: Panel, workspace: Workspace, outcomes: Mapping[str, JobOutcome]) -> dict[str, Any]:
    curves = [
        {"name": name, "points": [{"x": one.x, **measured(one.cell, workspace, outcomes)} for one in points]}
        for name, points in panel.curves
    ]
    sources: dict[str, Any] = {}
    for name, job in panel.sources:
        if finished(job, workspace) is None:
            outcome = outcomes.get(job.key)
            sources[name] = {"missing": outcome.message if outcome else "not run yet"}
        elif isinstance(job, Measurement):
            sources[name] = job.result(workspace)
        else:
            # Features and snapshots stay in the job's folder, where the report reads them.
            sources[name] = {"folder": str(workspace.ready(job).relative_to(workspace.root))}
    return {"title": panel.title, "curves": curves, "sources": sources}
