"""Plans: what a table or figure consists of, and the jobs behind it, before anything has run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from menet.experiments import claims
from menet.experiments.claims import Claim, Setting
from menet.experiments.jobs import Certify, Evaluate, Job, transformed
from menet.experiments.measures import Cost, Ranks, Reconstructions, Vectors
from menet.experiments.scale import Scale

Criterion = Literal["expected", "vote", "hard"]
Form = Literal["lines", "ranks", "reconstructions", "plane", "distances", "pictures"]
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "svhn": "SVHN", "tiny-imagenet": "Tiny-ImageNet"}
VOTES = 10
"""Masks that the paper's vote is taken over."""


@dataclass(frozen=True)
class Cell:
    """One number of a table: which rows it is read from, and how."""

    row: str
    column: str
    job: Evaluate | Certify | Cost
    clean: bool = False
    """Of the clean images, not the attacked ones."""
    criterion: Criterion = "expected"
    """`expected` over fresh masks is the paper's one mask less its chance; `hard`: right after every restart."""
    top: int = 1
    radius: int | None = None
    """Of certificates: changed pixels that must not turn the vote."""
    ours: bool = False
    """Beyond the paper, which claims nothing here."""

    def setting(self) -> Setting:
        """What is measured, in the words of the claims, from the configuration that will run."""
        if not isinstance(self.job, Evaluate):
            raise TypeError(f"a cell of a {self.job.kind} job has no setting in the paper's words")
        return _setting(self, self.job)


@dataclass(frozen=True)
class Table:
    """A table: its cells in reading order."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    label: str | None = None
    """In the paper's source; None for a table of ours."""
    note: str = ""

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(cell.job for cell in self.cells)

    def claim(self, cell: Cell) -> Claim | None:
        """What the paper says where the cell stands."""
        if self.label is None or cell.ours:
            return None
        return claims.by_place().get((self.label, cell.row, cell.column))

    def at(self, scale: Scale) -> "Table":
        """The same table from smaller jobs."""
        return replace(self, cells=tuple(replace(one, job=transformed(one.job, scale)) for one in self.cells))


@dataclass(frozen=True)
class Point:
    """A number of a curve, and where it stands on the horizontal axis."""

    x: float
    cell: Cell


@dataclass(frozen=True)
class Panel:
    """One part of a figure: named curves of cells, or the named jobs it is drawn from."""

    title: str
    curves: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    sources: tuple[tuple[str, Ranks | Reconstructions | Vectors | Evaluate], ...] = ()

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
    """A figure: its panels and the form they are drawn in."""

    name: str
    title: str
    form: Form
    panels: tuple[Panel, ...]
    across: str = ""
    """What the horizontal axis is."""
    label: str | None = None
    note: str = ""

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(job for panel in self.panels for job in panel.jobs)

    def at(self, scale: Scale) -> "Figure":
        """The same figure from smaller jobs."""
        return replace(self, panels=tuple(panel.at(scale) for panel in self.panels))


Plan = Table | Figure


def graph(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """All jobs that `jobs` need and they themselves, each once, none before what it needs."""
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
    return replace(cell, job=transformed(cell.job, scale))


def _setting(cell: Cell, job: Evaluate) -> Setting:
    config, defense = job.model.config, job.model.config.defense
    method = defense.get("name") or ("madry" if config.objective == "adversarial" else "vanilla")
    ours = method == "me-net"
    p = defense["p"] if ours else None
    known: dict[str, object] = {}
    if cell.clean:
        access = "clean"
    else:
        access, known = _attack(cell, job, method)
    return Setting(
        dataset=config.dataset,
        network=config.model,
        method=method,
        training=config.objective,
        p=tuple(p) if isinstance(p, list) else p,
        masks=defense["masks"] if ours else None,
        estimator=defense["estimator"]["name"] if ours else None,
        access=access,
        inference={"expected": "single", "vote": "vote", "hard": "all-restarts"}[cell.criterion],
        metric=f"top-{cell.top}",
        **known,  # type: ignore[arg-type]
    )


def _attack(cell: Cell, job: Evaluate, method: str) -> tuple[str, dict[str, object]]:
    """The adversary's access, and what the paper says of its attack: it gives no steps of CW and SPSA."""
    if job.source is not None or job.attack in ("boundary", "spsa"):
        access = "black-box"
    elif job.gray:
        access = "gray-box"
    else:
        access = "after-preprocessing" if job.attack == "after-preprocessing" else "white-box"
    settings, attack = job.settings, job.attack
    if attack == "after-preprocessing":
        attack = "cw" if "kappa" in settings else "pgd" if settings["steps"] > 1 else "fgsm"
    if attack == "pgd" and access == "white-box" and method not in ("vanilla", "madry"):
        attack = "bpda"
    known: dict[str, object] = {"attack": attack, "kappa": settings.get("kappa")}
    if attack in ("pgd", "bpda", "approximate-input", "projected-bpda"):
        known |= {"steps": settings["steps"], "step_size": f"{255 * settings['step_size']:.4g}/255"}
        known["restarts"] = settings.get("restarts")
    if attack == "boundary":
        known["steps"] = settings["steps"]
    return access, known
