"""`menet report`: tables and figures from records, in one HTML file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from menet.files import write_atomically
from menet.report.collect import collect
from menet.report.contents import report_of
from menet.report.html import page
from menet.report.markdown import write_markdown


@dataclass(frozen=True)
class Report:
    """Make a report of a folder of records: tables with intervals, curves, pictures, certificates, audits.

    Everything is computed from what is in the folder, at any depth; nothing is measured again. The page is one
    file that asks for nothing outside itself.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder of records, of runs, or of several of them (`menet evaluate`, `certify` and `audit` fill it)."""

    out: Path | None = None
    """The page; FOLDER/report.html if not given."""

    title: str | None = None
    """Title of the page."""

    notes: Path | None = None
    """JSON file with a title, names of models and the paper's numbers; FOLDER/report.json if not given."""

    markdown: bool = False
    """Also write the report as Markdown, with its figures as PNG files."""

    damaged: bool = False
    """Use the sound rows of damaged record files, and say which were left out."""

    def __call__(self) -> int:
        collection = collect(self.folder, damaged=self.damaged, notes=self.notes)
        report = report_of(collection, self.title)
        file = self.out or self.folder / "report.html"
        write_atomically(file, page(report))
        print(f"report: {file}")
        if self.markdown:
            written = write_markdown(report, file.with_suffix(".md"))
            print(f"Markdown: {written[0]} and {len(written) - 1} figures")
        return 0
