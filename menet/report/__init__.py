"""Reports: tables, figures and sentences as pure functions of records, on one HTML page.

Here a table as plain values, shown in a terminal or in HTML, or written as Markdown, CSV, JSON or LaTeX.
"""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from menet.errors import ConfigurationError
from menet.files import write_atomically

LEAST_WORDS = 16
"""Characters of a column of words below which notes of numbers are rather put below them."""


@dataclass(frozen=True)
class Cell:
    """Text, and in small letters below it a note that qualifies it."""

    text: str
    note: str = ""
    number: bool = False
    style: str = ""
    """Style of the text in a terminal, as rich names it."""


@dataclass(frozen=True)
class Table:
    """A table with a title above and an explanation below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    explanation: str = ""

    def markdown(self) -> str:
        """The table as Markdown; a note follows its cell in parentheses."""
        lines = ["| " + " | ".join(map(_markdown, self.columns)) + " |"]
        numbers = [bool(self.rows) and self.rows[0][place].number for place in range(len(self.columns))]
        lines.append("|" + "|".join("---:" if number else "---" for number in numbers) + "|")
        for row in self.rows:
            lines.append("| " + " | ".join(_markdown(_joined(cell)) for cell in row) + " |")
        return "\n".join(lines)

    def csv(self) -> str:
        """The table as CSV; the notes of a column, such as intervals, are a column of their own after it."""
        noted = [any(row[place].note for row in self.rows) for place in range(len(self.columns))]
        target = io.StringIO()
        writer = csv.writer(target, lineterminator="\n")
        for cells in ([Cell(name, f"{name} (note)") for name in self.columns], *self.rows):
            writer.writerow(
                [
                    text
                    for cell, note in zip(cells, noted, strict=True)
                    for text in (cell.text, cell.note)[: 1 + note]
                ]
            )
        return target.getvalue()

    def plain(self) -> dict[str, Any]:
        """The table as plain values: rows of objects by column, each with its text and, if any, its note."""
        rows = [
            {
                name: {"text": cell.text, **({"note": cell.note} if cell.note else {})}
                for name, cell in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]
        return {"title": self.title, "columns": self.columns, "rows": rows, "explanation": self.explanation}

    def json(self) -> str:
        """The plain values of the table as JSON."""
        return json.dumps(self.plain(), indent=1, ensure_ascii=False) + "\n"

    def latex(self) -> str:
        """The table as LaTeX, for the package booktabs; a note follows its cell in small letters."""
        numbers = [bool(self.rows) and self.rows[0][place].number for place in range(len(self.columns))]
        lines = [
            rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numbers)}}}",
            r"\toprule",
            " & ".join(map(_latex, self.columns)) + r" \\",
            r"\midrule",
        ]
        for row in self.rows:
            cells = (
                _latex(cell.text) + (rf" {{\scriptsize ({_latex(cell.note)})}}" if cell.note else "")
                for cell in row
            )
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def written(self, file: Path) -> Path:
        """Write the table to a file in the format of its name: .csv, .json, .tex or .md."""
        formats = {
            ".csv": self.csv,
            ".json": self.json,
            ".tex": self.latex,
            ".md": lambda: self.markdown() + "\n",
        }
        if file.suffix not in formats:
            raise ConfigurationError(f"expected a file name with {', '.join(formats)}, got {str(file)!r}")
        write_atomically(file, formats[file.suffix]())
        return file

    def rich(self, *, lines: bool = True, stacked: bool = False) -> RichTable:
        """The table for a terminal, with or without lines around cells, notes beside numbers or below them."""
        style: dict[str, Any] = {} if lines else {"box": None, "pad_edge": False}
        table = RichTable(title=escape(self.title), title_justify="left", title_style="bold", **style)
        for place, column in enumerate(self.columns):
            number = bool(self.rows) and self.rows[0][place].number
            # Numbers are never broken, so the words above them are.
            heading = column.replace(" ", "\n") if number else column
            table.add_column(
                escape(heading), justify="right" if number else "left", no_wrap=number, overflow="fold"
            )
        names = [_joined(row[0]) for row in self.rows]
        grouped = len(set(names)) < len(names)
        above: str | None = None
        for row in self.rows:
            # A name stands once, in the first of its rows; a line separates names.
            name = _joined(row[0])
            if grouped and above is not None and name != above:
                table.add_section()
            first, *others = (_styled(cell, stacked and cell.number) for cell in row)
            table.add_row("" if name == above else first, *others)
            above = name
        return table

    def print(self, console: Console | None = None, *, lines: bool = True) -> None:
        """Show the table and its explanation in a terminal."""
        console = console or Console()
        console.print(self.rich(lines=lines, stacked=self._width() > console.width))
        if self.explanation:
            console.print(self.explanation, style="dim", markup=False, highlight=False)

    def _width(self) -> int:
        """Columns of a terminal that the table takes if numbers have their notes beside them, and words wrap."""
        numbers = [bool(self.rows) and self.rows[0][place].number for place in range(len(self.columns))]
        widest = (max(len(_joined(row[place])) for row in self.rows) for place in range(len(self.columns)))
        return sum(
            3 + (size if number else min(size, LEAST_WORDS)) for number, size in zip(numbers, widest, strict=True)
        )

    def only(self, *columns: str, explanation: str = "") -> "Table":
        """The same table with these columns alone."""
        places = [self.columns.index(column) for column in columns]
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return Table(self.title, columns, rows, explanation)


def _joined(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _markdown(text: str) -> str:
    for character in "\\|*_<`[":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _latex(text: str) -> str:
    escaped = "".join(
        {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}.get(
            character, f"\\{character}" if character in "&%$#_{}" else character
        )
        for character in text
    )
    symbols = {"ε": r"$\varepsilon$", "ℓ∞": r"$\ell_\infty$", "ℓ2": r"$\ell_2$", "ℓ0": r"$\ell_0$", "≤": r"$\le$"}
    symbols |= {"→": r"$\to$", "−": "$-$", "–": "--", "κ": r"$\kappa$", "×": r"$\times$"}
    for symbol, command in symbols.items():
        escaped = escaped.replace(symbol, command)
    return escaped


def _styled(cell: Cell, stacked: bool = False) -> str:
    text = escape(f"{cell.text}\n{cell.note}" if stacked and cell.note else _joined(cell))
    return f"[{cell.style}]{text}[/{cell.style}]" if cell.style else text
