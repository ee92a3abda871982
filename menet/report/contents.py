"""The parts of a report in their order: the same for HTML and Markdown."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from menet.report import embedding, figures, series, tables
from menet.report.collect import Collection, Subject
from menet.report.pictures import portraits
from menet.report.plain_words import at_threat, common_threat, meaning, strongest
from menet.report.style import styled
from menet.report.tables import Cell, Table
from menet.report.words import attack_words, duration, model_words, threat_words


@dataclass(frozen=True)
class Picture:
    """A figure with its file's name and what it shows."""

    name: str
    caption: str
    content: Figure | bytes
    """A figure to draw, or a PNG file."""
    wide: bool = False

    def png(self) -> bytes:
        """The picture as a PNG file."""
        if isinstance(self.content, bytes):
            return self.content
        return _drawn(self.content, "png", dpi=144)

    def svg(self) -> bytes:
        """The picture as lines, which stay sharp at any size."""
        assert isinstance(self.content, Figure)
        return _drawn(self.content, "svg")


@dataclass(frozen=True)
class Section:
    """A heading, and what stands under it."""

    anchor: str
    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: tuple[dict[str, Any], ...] = ()
    folded: bool = False
    """Long and for few readers: closed until asked for."""


@dataclass(frozen=True)
class Report:
    """All of a report but its form."""

    title: str
    introduction: tuple[str, ...]
    sections: tuple[Section, ...]


def report_of(collection: Collection, title: str | None = None) -> Report:
    """Compute every table and figure that the collection has something for."""
    parts: tuple[Callable[[Collection], Section | None], ...] = (
        _meaning,
        _accuracies,
        _curves,
        _pictures,
        _features,
        _certificates,
        _audit,
        _all_numbers,
        _made,
    )
    notes = collection.notes
    found = [section for part in parts if (section := part(collection)) is not None]
    return Report(
        title or notes.title or f"Evaluation of {collection.folder.resolve().name}",
        notes.introduction,
        tuple(found),
    )


def _meaning(collection: Collection) -> Section | None:
    paragraphs = (*collection.notes.meaning, *meaning(collection))
    return Section("meaning", "What the numbers mean", paragraphs) if paragraphs else None


def _accuracies(collection: Collection) -> Section | None:
    if not any(subject.evaluations for subject in collection.subjects):
        return None
    paragraphs = tuple(f"A line was damaged and is left out: {fault}." for fault in collection.damage)
    paragraphs += tuple(
        f"{subject.name}, {label}: {len(records.missing)} examples have no row yet."
        for subject in collection.subjects
        for label, records in subject.evaluations.items()
        if records.missing
    )
    compared = tables.comparisons(collection)
    shown = (tables.overview(collection), *([compared] if compared.rows else []))
    return Section("accuracy", "Accuracy", paragraphs, shown)


def _curves(collection: Collection) -> Section | None:
    pictures = [
        Picture(f"accuracy-{axis.name}", axis.title, figures.sweep(axis, curves))
        for axis, curves in series.sweeps(collection.subjects).items()
    ]
    votes: list[series.Series] = []
    losses: list[series.Series] = []
    # Other sizes of the change are points of the curves above; here they would only crowd.
    threat = common_threat(collection.subjects)
    for subject in collection.subjects:
        for records in at_threat(subject, threat):
            name = f"{subject.name}, {attack_words(records)}"
            voted, loss = series.voting(records), series.losses(records)
            if voted is not None:
                votes.append(series.Series(name, voted.points))
            # The loss of a transferred attack is that of its source.
            if loss is not None and records.evaluation["attack"].get("kind") != "Transfer":
                losses.append(series.Series(name, loss.points))
    if votes:
        caption = "Accuracy of the vote, by how many masks vote"
        pictures.append(Picture("accuracy-votes", caption, figures.votes(votes[:8])))
    if losses:
        caption = "Mean loss by step of the attack: it should rise and flatten"
        pictures.append(Picture("loss-steps", caption, figures.losses(losses[:8])))
    return Section("curves", "Curves", (), (), tuple(pictures)) if pictures else None


def _pictures(collection: Collection) -> Section | None:
    pictures = []
    if collection.reconstruction is not None:
        caption = "Real images, what a mask leaves of them, and what each method estimates from that"
        pictures.append(Picture("reconstruction", caption, collection.reconstruction, wide=True))
    threat = common_threat(collection.subjects)
    for subject in collection.subjects:
        shown = [one for one in at_threat(subject, threat) if any("pictures" in row for row in one.rows)]
        if shown:
            records = strongest(shown)
            figure = portraits(records)
            assert figure is not None
            caption = f"{subject.name}: {attack_words(records)}, {threat_words(records.evaluation)}"
            pictures.append(Picture(f"pictures-{len(pictures)}", caption, _drawn(figure, "png", dpi=144)))
    paragraphs = (
        "Below an image are the predicted class and its probability, red where it is wrong. Behind a "
        "preprocessing, “clean” and “adversarial” are answered by the network without it, if it can be asked so.",
    )
    return Section("pictures", "Pictures", paragraphs, (), tuple(pictures)) if pictures else None


def _features(collection: Collection) -> Section | None:
    named = [(subject.name, features) for subject in collection.subjects for features in subject.features[:1]]
    named = [(name, features) for name, features in named if len(features.labels) >= 8]
    if not named:
        return None
    return Section(
        "features",
        "How the networks separate the classes",
        ("Vectors before the last layer, for clean images and for the same images under a transferred attack.",)
        if all(re.search("[:,]on=", features.label) for _, features in named)
        else ("Vectors before the last layer, for clean images and for the same images under attack.",),
        (),
        (
            Picture("t-sne", "t-SNE of the vectors, coloured by true class", embedding.t_sne(named)),
            Picture(
                "distances", "Distances within and between classes (empirical CDFs)", embedding.distances(named)
            ),
        ),
    )


def _certificates(collection: Collection) -> Section | None:
    subjects = [subject for subject in collection.subjects if subject.certificate is not None]
    if not subjects:
        return None
    curves = [curve for subject in subjects if (curve := series.certified(subject)) is not None]
    picture = Picture("certificate", "Certified accuracy by changed pixels", figures.certified(curves))
    return Section("certificate", "What is proven", (), (tables.certificates(subjects),), (picture,))


def _audit(collection: Collection) -> Section | None:
    findings = tuple(
        {
            "model": subject.name,
            "name": finding["name"],
            "status": finding["status"],
            "meaning": finding["meaning"],
            "numbers": [(name, _numbers(value)) for name, value in finding["numbers"].items()],
        }
        for subject in collection.subjects
        if subject.audit is not None
        for finding in subject.audit["findings"]
    )
    return Section("audit", "Audit", findings=findings) if findings else None


def _all_numbers(collection: Collection) -> Section | None:
    shown = tuple(tables.every_accuracy(subject) for subject in collection.subjects if subject.evaluations)
    return Section("numbers", "Every number", (), shown, folded=True) if shown else None


def _made(collection: Collection) -> Section:
    rows = [_made_row(subject) for subject in collection.subjects if subject.records]
    paragraphs: list[str] = []
    if collection.notes.seconds is not None:
        paragraphs.append(f"Everything was made in {duration(collection.notes.seconds)}.")
    machines = dict.fromkeys(
        _machine(records.header["made"]) for subject in collection.subjects for records in subject.records
    )
    paragraphs += [machine for machine in machines if machine]
    columns = ("model", "network", "data", "weights (SHA-256)", "seeds", "time attacking")
    table = Table("What was measured", columns, tuple(rows))
    return Section("made", "What made it", tuple(paragraphs), (table,) if rows else ())


def _made_row(subject: Subject) -> tuple[Cell, ...]:
    records = subject.records
    evaluation = records[0].evaluation
    data = evaluation["dataset"]
    seeds = sorted({int(one.evaluation["seed"]) for one in records})
    spent = sum(float(row.get("seconds", 0)) for one in records for row in one.rows)
    return (
        Cell(subject.name),
        Cell(model_words(records[0])),
        Cell(f"{data['name']}, {data['split']}", f"{evaluation['start']} to {evaluation['stop']}"),
        Cell(str(evaluation["model"].get("weights") or "none")[:12]),
        Cell(", ".join(map(str, seeds))),
        Cell(duration(spent), number=True),
    )


def _machine(made: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made.get("versions", {}).items())
    hardware = [
        str(made.get("processor", "")),
        f"{made.get('cores')} cores" if made.get("cores") else "",
        f"{made.get('threads')} threads" if made.get("threads") else "",
        str(made.get("device", "")),
    ]
    parts = [
        ", ".join(filter(None, hardware)),
        str(made.get("system", "")),
        f"Python {made.get('python')}",
        versions,
    ]
    return "; ".join(filter(None, parts)) + "."


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_numbers, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _drawn(figure: Figure, kind: str, dpi: float | None = None) -> bytes:
    target = io.BytesIO()
    # Without the date, and with the style's salt, the same records give the same file.
    with styled():
        figure.savefig(
            target, format=kind, dpi=dpi or "figure", metadata={"Date": None} if kind == "svg" else None
        )
    return target.getvalue()
