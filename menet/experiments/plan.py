"""Experiments as data: the cells of a table or the panels of a figure, the jobs that measure them, the numbers.

Numbers are functions of the records of finished jobs, saved as JSON summaries.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from menet.data import part_of
from menet.errors import RecordError
from menet.evaluation import Accuracy, Records, accuracy, certified_accuracies, restart_accuracies
from menet.evaluation.accuracy import Images
from menet.experiments import claims
from menet.experiments.claims import Claim, Setting
from menet.experiments.cost_model import SHAPES
from menet.experiments.jobs import SCHEDULED, VOTES, Certify, Evaluate, Job, Train, Workspace, transformed
from menet.experiments.measures import (
    FeatureVectors,
    Measurement,
    Quantity,
    Ranks,
    Reconstructions,
    Redistributed,
)
from menet.experiments.runner import JobOutcome, finished
from menet.experiments.scale import Scale
from menet.files import write_atomically

Criterion = Literal["expected", "vote", "vote-mean", "hard"]
Form = Literal["lines", "ranks", "reconstructions", "plane", "distances", "pictures", "diagram"]
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "svhn": "SVHN", "tiny-imagenet": "Tiny-ImageNet"}
FORMAT = "menet.reproduction/1"


@dataclass(frozen=True)
class Cell:
    """One number of a table: the job whose records it is computed from, and how."""

    row: str
    column: str
    job: Evaluate | Certify | Quantity
    clean: bool = False
    """Clean accuracy instead of robust accuracy."""
    criterion: Criterion = "expected"
    """`expected`: mean over fresh draws, of which the paper's single mask is one sample; `vote`: of ten draws
    with p from the training schedule; `vote-mean`: of ten draws with its mean; `hard`: correct after every
    restart."""
    restarts: int | None = None
    """Count the first this many restarts of the job; all if None."""
    top: int = 1
    radius: int | None = None
    """Of certificates: the number of perturbed pixels (L0) that must not change the vote."""
    ours: bool = False
    """An extension: the paper has no such number."""
    reduced: str = ""
    """What the scale leaves of the attack, such as "60 of 100 steps"; empty if all."""

    @property
    def reading(self) -> tuple[object, ...]:
        """What is measured and how it is read: cells in which these agree have the same number."""
        return (self.job.key, self.clean, self.criterion, self.restarts, self.top, self.radius)

    def setting(self) -> Setting:
        """The configuration that will run, as a setting to compare with that of the claim."""
        if not isinstance(self.job, Evaluate):
            raise TypeError(f"expected a cell of an evaluate job, got {self.job.kind}")
        return _setting(self, self.job)


@dataclass(frozen=True)
class Table:
    """A table: its cells in reading order."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    label: str | None = None
    """Label in the paper's source; None for an extension."""
    note: str = ""

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(cell.job for cell in self.cells)

    def claim(self, cell: Cell) -> Claim | None:
        """The paper's number in the place of this cell, if it has one."""
        if self.label is None or cell.ours:
            return None
        return claims.by_place().get((self.label, cell.row, cell.column))

    def at(self, scale: Scale) -> "Table":
        """The same table from the jobs of a scale, without the rows that the scale does not measure."""
        kept = tuple(cell for cell in self.cells if scale.measures(cell.job))
        rows = dict.fromkeys(cell.row for cell in kept)
        left_out = [row for row in dict.fromkeys(cell.row for cell in self.cells) if row not in rows]
        note = f"Not measured at scale {scale.name}: {'; '.join(left_out)}." if left_out else ""
        cells = tuple(_cell_at(cell, scale) for cell in kept)
        return replace(self, cells=cells, note=" ".join(filter(None, (self.note, note))))

    def select(self, keeps: "Selection") -> "Table":
        """The table of the cells to keep."""
        cells = self.cells
        return replace(
            self, cells=tuple(one for one in cells if keeps(f"{one.row} {one.column}", one.job, one.ours))
        )


@dataclass(frozen=True)
class Point:
    """One point of a curve: its position on the horizontal axis and its number."""

    x: float
    cell: Cell


@dataclass(frozen=True)
class Panel:
    """One panel of a figure: named curves of cells, or the named jobs it is drawn from."""

    title: str
    curves: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    sources: tuple[tuple[str, Ranks | Reconstructions | Redistributed | FeatureVectors], ...] = ()

    @property
    def jobs(self) -> tuple[Job, ...]:
        cells = tuple(point.cell.job for _, points in self.curves for point in points)
        return cells + tuple(job for _, job in self.sources)

    def at(self, scale: Scale) -> "Panel":
        return replace(
            self,
            curves=tuple(
                (name, tuple(replace(one, cell=_cell_at(one.cell, scale)) for one in points))
                for name, points in self.curves
            ),
            sources=tuple((name, transformed(job, scale)) for name, job in self.sources),
        )


@dataclass(frozen=True)
class Figure:
    """A figure: its panels, and the form in which the report draws them."""

    name: str
    title: str
    form: Form
    panels: tuple[Panel, ...]
    across: str = ""
    """Label of the horizontal axis."""
    label: str | None = None
    note: str = ""

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(job for panel in self.panels for job in panel.jobs)

    def at(self, scale: Scale) -> "Figure":
        """The same figure from the jobs of a scale."""
        return replace(self, panels=tuple(panel.at(scale) for panel in self.panels))

    def select(self, keeps: "Selection") -> "Figure":
        """The figure of the points and pictures to keep."""
        panels = []
        for panel in self.panels:
            curves = tuple(
                (name, tuple(one for one in points if keeps(f"{panel.title} {name}", one.cell.job, False)))
                for name, points in panel.curves
            )
            sources = tuple((name, job) for name, job in panel.sources if keeps(panel.title, job, False))
            panels.append(replace(panel, curves=curves, sources=sources))
        return replace(self, panels=tuple(panels))


Experiment = Table | Figure
Selection = Callable[[str, Job, bool], bool]
"""Whether to keep a number or picture, by its words, its job, and whether the paper lacks it."""


def cells_of(experiment: Experiment) -> Iterator[tuple[tuple[object, ...], Cell]]:
    """Its cells with the place of each: row and column, or panel, curve and position."""
    if isinstance(experiment, Table):
        yield from (((cell.row, cell.column), cell) for cell in experiment.cells)
        return
    for panel in experiment.panels:
        for name, points in panel.curves:
            yield from (((panel.title, name, point.x), point.cell) for point in points)


def datasets_of(job: Job) -> set[str]:
    """The datasets that a job and those it needs use."""
    own = job.config.dataset if isinstance(job, Train) else getattr(job, "dataset", None)
    return ({own} if own else set()).union(*(datasets_of(need) for need in job.needs))


def graph(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """`jobs` and all that they need, each once, in an order in which each comes after those it needs."""
    ordered: dict[str, Job] = {}
    for job in jobs:
        for one in _with_needs(job):
            ordered.setdefault(one.key, one)
    return tuple(ordered.values())


def _with_needs(job: Job) -> Iterator[Job]:
    for need in job.needs:
        yield from _with_needs(need)
    yield job


def _cell_at(cell: Cell, scale: Scale) -> Cell:
    restarts = None if cell.restarts is None else scale.restarts(cell.restarts)
    scaled = replace(cell, job=transformed(cell.job, scale), restarts=restarts)
    return replace(scaled, reduced=", ".join(_reduced(cell, scaled)))


def _reduced(cell: Cell, scaled: Cell) -> Iterator[str]:
    """In what the attack of a scaled cell is smaller."""
    if cell.clean or not isinstance(cell.job, Evaluate) or not isinstance(scaled.job, Evaluate):
        return
    names = {"steps": "steps", "restarts": "restarts", "eot": "draws per gradient", "samples": "samples"}
    for name, words in names.items():
        before, after = cell.job.settings.get(name), scaled.job.settings.get(name)
        if name == "restarts" and cell.restarts is not None:
            before, after = cell.restarts, scaled.restarts
        if before is not None and after is not None and after < before:
            yield f"{after:,} of {before:,} {words}"


def _setting(cell: Cell, job: Evaluate) -> Setting:
    config, defense = job.model.config, job.model.config.defense
    method = defense.get("name") or ("madry" if config.objective == "adversarial" else "vanilla")
    is_me_net = method == "me-net"
    p = defense.get("p")
    known: dict[str, object] = {}
    if cell.clean:
        access = "clean"
    else:
        access, known = _attack(job, method)
        if cell.restarts is not None:
            known["restarts"] = cell.restarts
    return Setting(
        dataset=config.dataset,
        network=config.model,
        method=method,
        training=config.objective,
        training_steps=job.model.steps(SHAPES[config.dataset][3]),
        p=tuple(p) if isinstance(p, list) else p,
        masks=defense["masks"] if is_me_net else None,
        estimator=defense["estimator"]["name"] if is_me_net else None,
        access=access,
        inference={"expected": "single", "hard": "all-restarts"}.get(cell.criterion, cell.criterion),
        metric=f"top-{cell.top}",
        **known,  # type: ignore[arg-type]
    )


def _attack(job: Evaluate, method: str) -> tuple[str, dict[str, object]]:
    """The adversary's access, and the settings the paper states: it gives no steps of CW and SPSA."""
    if job.surrogate is not None or job.attack in ("boundary", "spsa"):
        access = "black-box"
    elif job.gray:
        access = "gray-box"
    else:
        access = "classifier-only" if job.attack == "classifier-only" else "white-box"
    settings, attack = job.settings, job.attack
    if attack == "classifier-only":
        attack = "cw" if "kappa" in settings else "pgd" if settings["steps"] > 1 else "fgsm"
    if attack == "pgd" and access == "white-box" and method not in ("vanilla", "madry"):
        attack = "bpda"
    known: dict[str, object] = {
        "attack": attack,
        "epsilon": None if settings["epsilon"] is None else f"{255 * settings['epsilon']:.4g}/255",
        "kappa": settings.get("kappa"),
        "samples": settings.get("samples"),
    }
    if attack in ("pgd", "bpda", "approximate-input", "projected-bpda"):
        known |= {"steps": settings["steps"], "step_size": f"{255 * settings['step_size']:.4g}/255"}
        known["restarts"] = settings.get("restarts")
    if attack == "boundary":
        known["steps"] = settings["steps"]
    return access, known


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
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"expected JSON in {path}: {error}") from error
    if not isinstance(found, dict):
        raise RecordError(f"expected a JSON object in {path}, got a {type(found).__name__}")
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
    """The number of a cell with its interval, in percent unless its unit is another, or why there is none."""
    job = cell.job
    start: dict[str, Any] = {"job": f"{job.kind}/{job.key[:20]}", "does": job.title()}
    if finished(job, workspace) is None:
        outcome = outcomes.get(job.key)
        return {**start, "missing": outcome.message if outcome else "not run yet"}
    if isinstance(job, Quantity):
        return {**start, **job.number(workspace)}
    records = job.records(workspace)
    number = number_of(cell, job, records)
    seconds = {one: finished(one, workspace) for one in graph([job])}
    part = part_of(records.evaluation["dataset"])
    return {
        **start,
        "seconds": {workspace.name(one): round(spent) for one, spent in seconds.items() if spent is not None},
        "unit": "%",
        "value": 100 * number.value,
        "low": 100 * number.low,
        "high": 100 * number.high,
        "examples": number.examples,
        "interval": number.interval,
        "dataset": job.model.config.dataset,
        "training": job.model.described(),
        **({"reduced": cell.reduced} if cell.reduced else {}),
        **({"shipped": True} if (workspace.folder(job.model) / "run").is_file() else {}),
        **({"bfloat16": True} if records.evaluation.get("bfloat16") else {}),
        **({"part": part} if part else {}),
        **_distances(job, records),
    }


def _distances(job: Evaluate | Certify, records: Records) -> dict[str, Any]:
    """The median distance of what an attack without a budget found, among images that it moved."""
    if not isinstance(job, Evaluate) or job.settings.get("epsilon", 0) is not None:
        return {}
    found = {
        norm: [row["perturbation"][norm] for row in records.rows if row["perturbation"][norm]]
        for norm in ("l2", "linf")
    }
    return {"median_distance": {norm: median(values) if values else 0.0 for norm, values in found.items()}}


def number_of(cell: Cell, job: Evaluate | Certify, records: Records) -> Accuracy:
    """The number of a cell from the records of its job."""
    if isinstance(job, Certify):
        radius = cell.radius or 0
        return certified_accuracies(records, [radius])[radius]
    if cell.criterion == "hard":
        rows = tuple({**row, "restarts": row["restarts"][: cell.restarts]} for row in records.rows)
        return restart_accuracies(replace(records, rows=rows))[0]
    images: Images = "clean" if cell.clean else "adversarial"
    if cell.criterion == "vote":
        rows = tuple({**row, "adversarial": row["views"][SCHEDULED]} for row in records.rows)
        return accuracy(replace(records, rows=rows), "adversarial", "vote", cell.top)
    if cell.criterion == "vote-mean":
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
            # Features stay in the job's folder, where the report reads them.
            sources[name] = {"folder": str(workspace.ready(job).relative_to(workspace.root))}
    return {"title": panel.title, "curves": curves, "sources": sources}
