"""`menet report` and `menet compare`: what records say, as a page or as one table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from menet.commands import Csv, Json, Latex, Output, printing
from menet.commands.options import Run, Tables
from menet.errors import RecordError


@dataclass(frozen=True)
class Report:
    """Write a report from a folder of records: tables with intervals, curves, images, certificates, audits.

    Everything is computed from the records in the folder and below it; no model is run. The page is one file that
    loads nothing else. Compact results (`menet publish`) become RESULTS.md, board.html and board.json.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder of records or of runs (`menet evaluate`, `certify` and `audit` write them)."""

    out: Path | None = None
    """The page. Default: FOLDER/report.html."""

    title: str | None = None
    """Title of the page."""

    notes: Path | None = None
    """JSON file with a title, names of models and the paper's numbers. Default: FOLDER/report.json."""

    markdown: bool = False
    """Also write the report as Markdown, with its figures as PNG files."""

    fill: tuple[Path, ...] = ()
    """Of compact results: Markdown files that get the main table between their markers, <!-- results --> and
    <!-- /results -->, or its lines of some names (<!-- results vanilla adversarial -->), and published tables of
    `menet reproduce` between <!-- reproduced NAME SCALE --> and <!-- /reproduced -->."""

    tables: Tables = ()
    """Also write every table in these formats."""

    damaged: bool = False
    """Skip damaged lines of records, and list them, instead of refusing the file."""

    check: bool = False
    """Of compact results: write nothing, but say what a reviewer would refuse, with exit code 1."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.report.collect import showing

        with showing(self.folder):
            return self._show(out)

    def _show(self, out: Output) -> int:
        from menet.evaluation.results import MODEL
        from menet.files import write_atomically
        from menet.report.board import problems, write_board
        from menet.report.collect import collect
        from menet.report.documents import fill_results
        from menet.report.page import render_html, report_of, write_markdown, write_tables

        if any(file.with_name(MODEL).is_file() for file in self.folder.rglob("*.npz")):
            if self.check:
                found = problems(self.folder)
                out.value(problems=found)
                print("\n".join(found) or "nothing to object to")
                return 1 if found else 0
            written = [*write_board(self.folder), *(fill_results(file, self.folder) for file in self.fill)]
            out.value(written=written)
            print("results: " + ", ".join(map(str, written)))
            return 0
        if self.check:
            raise RecordError(f"--check is for compact results (`menet publish`); {self.folder} has none")
        collection = collect(self.folder, damaged=self.damaged, notes=self.notes)
        report = report_of(collection, self.title)
        file = self.out or self.folder / "report.html"
        write_atomically(file, render_html(report))
        print(f"report: {file}")
        if self.markdown:
            written = write_markdown(report, file.with_suffix(".md"))
            print(f"Markdown: {written[0]} and {len(written) - 1} figures")
        out.value(report=file)
        for kind in self.tables:
            written = write_tables(report, file, kind)
            print(f"{kind}: {len(written)} tables in {written[0].parent}")
        return 0


@dataclass(frozen=True)
class Publish:
    """Pack the records of a run into compact results, small enough to commit, and render the board anew.

    RUN is what was evaluated. Written are RESULTS/NAME/*.npz, one file per attack, and model.json with the
    training's configuration and seeds; then RESULTS.md, board.html and board.json. Images and loss histories are
    left out. Of the folder of `menet reproduce` the tables with measured cells go to RESULTS/paper.
    """

    run: Run

    name: str | None = None
    """Name of the model on the board, such as mnist/me-net-adversarial."""

    evaluation: Path | None = None
    """Folder of its records. Default: RUN/evaluation."""

    certificate: tuple[Path, ...] = ()
    """Folders of certificates of it (`menet certify` writes them), published with its evaluation, or alone."""

    stop: int | None = None
    """Publish the examples before this one: for an evaluation that is not finished. Default: all."""

    out: Path = Path("results")
    """Folder of all results."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.commands.options import default_folder
        from menet.errors import ConfigurationError
        from menet.evaluation import publish, read_folder
        from menet.report.board import write_board
        from menet.training.pretrained import training_of

        if (Path(self.run) / "results").is_dir():
            from menet.experiments import EXPERIMENTS
            from menet.report.reproduction import pack

            written = pack(Path(self.run), self.out / "paper", list(EXPERIMENTS))
            out.value(written=written)
            print("results: " + ", ".join(map(str, written)))
            return 0
        if self.name is None:
            raise ConfigurationError("expected --name, the model's name on the board, such as mnist/me-net")
        evaluations, folder = {}, self.evaluation or default_folder(self.run, "evaluation")
        if self.evaluation is not None or folder.is_dir() or not self.certificate:
            evaluations = read_folder(folder)
        if self.stop is not None:
            evaluations = {label: one.until(self.stop) for label, one in evaluations.items()}
        attacks = len(evaluations)
        for place in self.certificate:
            title = "certificate" + f"-{place.name}" * (not place.name.startswith("certificate"))
            there = read_folder(place)
            if "certificate" not in there:
                raise RecordError(f"expected records of `menet certify` in {place}, got {', '.join(there)}")
            evaluations[title] = there["certificate"]
        written = publish(self.name, evaluations, training_of(self.run), self.out)
        size = sum(path.stat().st_size for path in written)
        parts = [f"{attacks} attacks", f"{len(self.certificate)} certificates"][: 1 + bool(self.certificate)]
        print(f"{self.name}: {', '.join(parts)}, {size / 1024:,.0f} KiB in {self.out / self.name}")
        written += (pages := write_board(self.out))
        out.value(written=written)
        print("results: " + ", ".join(map(str, pages)))
        return 0


Records = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class Compare:
    """Compare two models on the same examples, under every attack that both were evaluated with.

    The p-value is that of the exact McNemar test. Evaluations that differ in attack, threat model, scoring,
    classes or images are left out, and what differs is named.
    """

    first: Records
    """A run, or a folder of records (`menet evaluate` writes them)."""

    second: Records
    """The other one."""

    criterion: Literal["vote", "single", "mean", "worst"] = "vote"
    """An example counts as correct by the majority vote over draws, one draw, mean logits, or every draw."""

    out: Path | None = None
    """Also write the table to this file: .csv, .tex, .json or .md."""

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.report.collect import showing

        with showing(self.first):
            return self._compare(out)

    def _compare(self, out: Output) -> int:
        from menet.evaluation.accuracy import incomparable
        from menet.report.accuracy_tables import comparison
        from menet.report.collect import Subject, evaluations_of

        first, second = (Subject(str(one), evaluations_of(one)) for one in (self.first, self.second))
        shared = [label for label in first.evaluations if label in second.evaluations]
        if not shared:
            ours, theirs = (", ".join(subject.evaluations) or "none" for subject in (first, second))
            raise RecordError(f"expected an attack that both were evaluated with, got {ours} and {theirs}")
        reasons = {label: incomparable(first.evaluations[label], second.evaluations[label]) for label in shared}
        left_out = [f"{label}: {reason}" for label, reason in reasons.items() if reason is not None]
        if len(left_out) == len(shared):
            raise RecordError(f"cannot compare {first.name} and {second.name}: {'; '.join(left_out)}")
        alike = [label for label in shared if reasons[label] is None]
        table = comparison(first, second, alike, self.criterion)
        out.table(table)
        out.value(left_out=left_out)
        for words in left_out:
            print(f"left out: {words}")
        if self.out is not None:
            print(f"table: {table.written(self.out)}")
        return 0
