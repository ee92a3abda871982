"""`menet report`: tables and figures from records, in one HTML file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Report:
    """Write a report from a folder of records: tables with intervals, curves, images, certificates, audits.

    Everything is computed from the records in the folder and below it; no model is run. The page is one file that
    loads nothing else.
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

    damaged: bool = False
    """Skip damaged lines of records, and list them, instead of refusing the file."""

    def __call__(self) -> int:
        from menet.files import write_atomically
        from menet.report.collect import collect
        from menet.report.page import render_html, report_of, write_markdown

        collection = collect(self.folder, damaged=self.damaged, notes=self.notes)
        report = report_of(collection, self.title)
        file = self.out or self.folder / "report.html"
        write_atomically(file, render_html(report))
        print(f"report: {file}")
        if self.markdown:
            written = write_markdown(report, file.with_suffix(".md"))
            print(f"Markdown: {written[0]} and {len(written) - 1} figures")
        return 0
