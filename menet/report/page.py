"""A report: its sections in order, and the page they become, as one HTML file or as Markdown with figures."""

import base64
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from menet.errors import ConfigurationError, require
from menet.files import write_atomically
from menet.progress import format_duration
from menet.report import Cell, Table, accuracy_tables, curves, figures
from menet.report.accuracy_tables import value_words
from menet.report.collect import Collection, Subject
from menet.report.figures import Figure, styled
from menet.report.narrative import (
    answer,
    at_threat,
    attack_words,
    common_threat,
    findings,
    is_transfer,
    model_words,
    threat_words,
    worst_case,
)
from menet.report.pictures import snapshots


@dataclass(frozen=True)
class Picture:
    """A figure with a file name and a caption."""

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
        """The picture as vector graphics."""
        assert isinstance(self.content, Figure)
        return _drawn(self.content, "svg")


@dataclass(frozen=True)
class Section:
    """A heading and the content below it."""

    anchor: str
    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: tuple[dict[str, Any], ...] = ()
    folded: bool = False
    """Long and for few readers: collapsed until opened."""


@dataclass(frozen=True)
class Report:
    """The content of a report, independent of its format."""

    title: str
    introduction: tuple[str, ...]
    sections: tuple[Section, ...]


def report_of(collection: Collection, title: str | None = None) -> Report:
    """Compute every table and figure for which the collection has records."""
    parts: tuple[Callable[[Collection], Section | None], ...] = (
        _answer,
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


def _answer(collection: Collection) -> Section | None:
    paragraphs = tuple(answer(collection))
    if not paragraphs:
        return None
    found = curves.worst_cases(collection.subjects)
    caption = "Robust accuracy over ε, the lowest over all attacks at each, with 95% intervals"
    pictures = (Picture("answer", caption, figures.worst_cases(found)),) if found else ()
    return Section("answer", "Does it help?", paragraphs, (accuracy_tables.summary(collection),), pictures)


def _meaning(collection: Collection) -> Section | None:
    paragraphs = (*collection.notes.meaning, *findings(collection))
    return Section("meaning", "What each number means", paragraphs, folded=True) if paragraphs else None


def _accuracies(collection: Collection) -> Section | None:
    if not any(subject.evaluations for subject in collection.subjects):
        return None
    paragraphs = tuple(f"Omitted a damaged line: {fault}." for fault in collection.damage)
    paragraphs += tuple(
        f"{subject.name}, {label}: incomplete, {len(records.missing)} examples are not evaluated yet."
        for subject in collection.subjects
        for label, records in subject.evaluations.items()
        if records.missing
    )
    compared = accuracy_tables.comparisons(collection)
    shown = (accuracy_tables.overview(collection), *([compared] if compared.rows else []))
    return Section("accuracy", "Accuracy", paragraphs, shown)


def _curves(collection: Collection) -> Section | None:
    pictures = [
        Picture(f"accuracy-{axis.name}", axis.title, figures.sweep(axis, found))
        for axis, found in curves.sweeps(collection.subjects).items()
    ]
    votes: list[curves.Series] = []
    losses: list[curves.Series] = []
    # Other budgets are points of the curves above; here they would only crowd.
    threat = common_threat(collection.subjects)
    for subject in collection.subjects:
        for records in at_threat(subject, threat):
            name = f"{subject.name}, {attack_words(records)}"
            voted, loss = curves.voting(records), curves.losses(records)
            if voted is not None:
                votes.append(curves.Series(name, voted.points))
            # The loss of a transfer attack is that of the surrogate.
            if loss is not None and not is_transfer(records):
                losses.append(curves.Series(name, loss.points))
    if votes:
        caption = "Robust accuracy of the majority vote by number of votes"
        pictures.append(Picture("accuracy-votes", caption, figures.votes(votes[:8])))
    if losses:
        caption = "Mean loss of the attack by step: it should rise and flatten"
        pictures.append(Picture("loss-steps", caption, figures.losses(losses[:8])))
    return Section("curves", "Curves", (), (), tuple(pictures)) if pictures else None


def _pictures(collection: Collection) -> Section | None:
    pictures = []
    if collection.reconstruction is not None:
        caption = "Images, the same with entries masked at random, and what each estimator reconstructs from them"
        pictures.append(Picture("reconstruction", caption, collection.reconstruction, wide=True))
    threat = common_threat(collection.subjects)
    for subject in collection.subjects:
        shown = [one for one in at_threat(subject, threat) if any("snapshots" in row for row in one.rows)]
        if shown:
            records = worst_case(shown)
            figure = snapshots(records)
            assert figure is not None
            caption = f"{subject.name}: {attack_words(records)}, {threat_words(records.evaluation)}"
            pictures.append(Picture(f"pictures-{len(pictures)}", caption, _drawn(figure, "png", dpi=144)))
    paragraphs = (
        "Below each image: the predicted class and its probability, in red if wrong. For a defended model, "
        "“clean” and “adversarial” show what the classifier alone predicts, if it accepts unprocessed images.",
    )
    return Section("pictures", "Example images", paragraphs, (), tuple(pictures)) if pictures else None


def _features(collection: Collection) -> Section | None:
    named = [(subject.name, features) for subject in collection.subjects for features in subject.features[:1]]
    named = [(name, features) for name, features in named if len(features.labels) >= 8]
    if not named:
        return None
    transfer = all(re.search("[:,]on=", features.label) for _, features in named)
    paragraphs = [
        "Features before the last layer, for clean images and for the same images under "
        + ("a transfer attack." if transfer else "attack.")
    ]
    pictures = []
    try:
        pictures.append(Picture("t-sne", "t-SNE of the features, colored by true class", figures.t_sne(named)))
    except ConfigurationError as error:
        paragraphs.append(f"Without t-SNE: {error}.")
    caption = "Distances within and between classes (empirical CDFs)"
    pictures.append(Picture("distances", caption, figures.distances(named)))
    return Section("features", "How the networks separate classes", tuple(paragraphs), (), tuple(pictures))


def _certificates(collection: Collection) -> Section | None:
    subjects = [subject for subject in collection.subjects if subject.certificate is not None]
    if not subjects:
        return None
    found = [curve for subject in subjects if (curve := curves.certified(subject)) is not None]
    picture = Picture("certificate", "Certified accuracy by perturbed pixels", figures.certified(found))
    return Section("certificate", "Certified accuracy", (), (accuracy_tables.certificates(subjects),), (picture,))


def _audit(collection: Collection) -> Section | None:
    found = tuple(
        {
            "model": subject.name,
            "name": finding["name"],
            "status": finding["status"],
            "meaning": finding["meaning"],
            "numbers": [(name, value_words(value)) for name, value in finding["numbers"].items()],
        }
        for subject in collection.subjects
        if subject.audit is not None
        for finding in subject.audit["findings"]
    )
    return Section("audit", "Audit", findings=found) if found else None


def _all_numbers(collection: Collection) -> Section | None:
    shown = tuple(
        accuracy_tables.every_accuracy(subject) for subject in collection.subjects if subject.evaluations
    )
    return Section("numbers", "Every number", (), shown, folded=True) if shown else None


def _made(collection: Collection) -> Section:
    rows = [_made_row(subject) for subject in collection.subjects if subject.records]
    paragraphs: list[str] = []
    if collection.notes.seconds is not None:
        paragraphs.append(f"Total time: {format_duration(collection.notes.seconds)}.")
    machines = dict.fromkeys(
        _machine(records.header["made"]) for subject in collection.subjects for records in subject.records
    )
    paragraphs += [machine for machine in machines if machine]
    columns = ("model", "network", "data", "weights (SHA-256)", "seeds", "evaluation time")
    table = Table("Models and data", columns, tuple(rows))
    return Section("made", "Provenance", tuple(paragraphs), (table,) if rows else ())


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
        Cell(format_duration(spent), number=True),
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


def _drawn(figure: Figure, kind: str, dpi: float | None = None) -> bytes:
    target = io.BytesIO()
    # Without the date, and with the style's salt, the same records give the same file.
    with styled():
        figure.savefig(
            target, format=kind, dpi=dpi or "figure", metadata={"Date": None} if kind == "svg" else None
        )
    return target.getvalue()


def render_html(report: Report) -> str:
    """The report as one HTML file that loads nothing: style inline, pictures as data, every name escaped."""
    jinja2 = require("jinja2", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("menet.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"picture": _source, "prose": _prose}
    return str(environment.get_template("page.html.jinja").render(report=report))


def _source(picture: Picture) -> Any:
    kind, content = ("svg+xml", picture.svg()) if isinstance(picture.content, Figure) else ("png", picture.png())
    return require("markupsafe", extra="report").Markup(
        f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    )


def _prose(text: str) -> Any:
    """Escaped text in which what stands between backticks is code, as in Markdown."""
    markupsafe = require("markupsafe", extra="report")
    return markupsafe.Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))


def write_markdown(report: Report, file: Path) -> list[Path]:
    """Write `file` and a folder of PNG figures named after it; return everything written."""
    figures = file.parent / f"{file.stem}-figures"
    written = []
    lines = [f"# {_escaped(report.title)}", "", *_paragraphs(report.introduction)]
    for section in report.sections:
        lines += [f"## {section.title}", "", *_markdown(section)]
        for picture in section.pictures:
            target = figures / f"{picture.name}.png"
            write_atomically(target, picture.png())
            written.append(target)
            caption = _escaped(picture.caption).replace("]", "\\]")
            lines += [f"![{caption}]({figures.name}/{target.name})", "", f"*{caption}*", ""]
    write_atomically(file, "\n".join(lines).rstrip() + "\n")
    return [file, *written]


def write_tables(report: Report, file: Path, kind: str) -> list[Path]:
    """Write every table of a report as csv, json or latex, in a folder named after `file`."""
    folder, ending = file.parent / f"{file.stem}-tables", {"latex": "tex"}.get(kind, kind)
    named = [
        (f"{section.anchor}{f'-{number}' if number else ''}", table)
        for section in report.sections
        for number, table in enumerate(section.tables)
    ]
    return [table.written(folder / f"{name}.{ending}") for name, table in named]


def _markdown(section: Section) -> list[str]:
    lines = _paragraphs(section.paragraphs)
    for table in section.tables:
        lines += [f"### {_escaped(table.title)}", "", table.markdown(), ""]
        lines += _paragraphs((table.explanation,) if table.explanation else ())
    for finding in section.findings:
        words = f"{finding['model']}, {finding['name']}: {finding['meaning']}"
        lines.append(f"- **{_escaped(finding['status'])}** {_escaped(words)}")
        lines += [f"  - {_escaped(f'{name}: {value}')}" for name, value in finding["numbers"]]
    return [*lines, ""] if section.findings else lines


def _paragraphs(paragraphs: tuple[str, ...]) -> list[str]:
    # Names of folders and attacks may hold anything; Markdown passes HTML through.
    return [line for paragraph in paragraphs for line in (_escaped(paragraph), "")]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
