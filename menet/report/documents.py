"""Results in documents: tables between the markers of Markdown files, so that no number there is typed."""

import re
from pathlib import Path
from typing import Any

from menet.errors import ConfigurationError
from menet.evaluation.results import read_result
from menet.experiments.jobs import Workspace
from menet.experiments.plan import load_summary
from menet.files import write_atomically
from menet.report import Cell, Table, board
from menet.report.accuracy_tables import results_table
from menet.report.reproduction import record_of, table_of
from menet.report.results import budgets_table, main_threats, paired_cells, paired_table

RESULTS = re.compile(r"(?P<begin><!-- results(?P<names>( [\w-]+)*) -->\n).*?(?P<end><!-- /results -->)", re.S)
"""Around the main table, or its lines of some names, such as <!-- results vanilla menet-pure -->."""
BUDGETS = re.compile(r"(?P<begin><!-- budgets (?P<dataset>[\w-]+) -->\n).*?(?P<end><!-- /budgets -->)", re.S)
"""Around the table of a dataset's models under several threat models, such as <!-- budgets mnist -->."""
PAIRED = re.compile(r"(?P<begin><!-- paired (?P<pairs>[^>]+?) -->\n).*?(?P<end><!-- /paired -->)", re.S)
"""Around a table of pairs, such as <!-- paired mnist/adversarial mnist/menet-adversarial -->, commas between."""
COMPARED = re.compile(
    r"(?P<begin><!-- compared (?P<name>\S+) (?P<scale>\S+)\n(?P<lines>.*?)-->\n).*?(?P<end><!-- /compared -->)",
    re.S,
)
"""Around rows of a reproduced table on the same images; each line in the marker is "COLUMN: ROW | ROW"."""
REPRODUCED = re.compile(
    r"(?P<begin><!-- reproduced (?P<name>\S+) (?P<scale>\S+) -->\n).*?(?P<end><!-- /reproduced -->)", re.S
)
"""Around a table of `menet reproduce`, such as <!-- reproduced table15 cores -->."""


def fill_results(file: Path, folder: Path) -> Path:
    """Put tables of the compact results in `folder` between the markers of a Markdown file.

    The main table, under the threat model of most models, goes between those of `RESULTS`, that of other threat
    models between those of `BUDGETS`, models on the same images between those of `PAIRED`, what was measured of a
    reproduced table between those of `REPRODUCED`, its rows on the same images between those of `COMPARED`.
    """
    text = file.read_text(encoding="utf-8")
    if not any(marker.search(text) for marker in (RESULTS, BUDGETS, PAIRED, COMPARED, REPRODUCED)):
        raise ConfigurationError(f"expected <!-- results --> and <!-- /results --> in {file}, got none")
    text = RESULTS.sub(lambda found: _main_table(found, folder), text)
    text = PAIRED.sub(lambda found: _paired(found, folder), text)
    text = BUDGETS.sub(lambda found: _budgets(found, folder), text)
    text = COMPARED.sub(lambda found: _compared(found, folder), text)
    write_atomically(file, REPRODUCED.sub(lambda found: _reproduced(found, folder), text))
    return file


def _main_table(found: re.Match[str], folder: Path) -> str:
    """The board in short between its markers, or the lines of every dataset that these name."""
    names, entries = found["names"].split(), board.entries(folder)
    main = main_threats(entries)
    lines = [
        line
        for line in board.rows([entry for entry in entries if entry.threat == main[entry.dataset]])
        if not names or line["name"].rpartition("/")[2] in names
    ]
    return f"{found['begin']}{results_table(lines).markdown()}\n{found['end']}"


def _budgets(found: re.Match[str], folder: Path) -> str:
    group = [entry for entry in board.entries(folder) if entry.dataset == found["dataset"]]
    return f"{found['begin']}\n{budgets_table(group).markdown()}\n\n{found['end']}"


def _paired(found: re.Match[str], folder: Path) -> str:
    pairs = [tuple(pair.split()) for pair in found["pairs"].split(",")]
    if not all(len(pair) == 2 for pair in pairs):
        raise ConfigurationError(f"expected two names of results in each pair, got {found['pairs']!r}")
    table = paired_table(board.entries(folder), [(pair[0], pair[1]) for pair in pairs])
    return f"{found['begin']}\n{table.markdown()}\n\n{found['end']}"


def _reproduced(found: re.Match[str], folder: Path) -> str:
    """The rows of a published table that have numbers, between its markers."""
    summary = _published(found, folder)
    rows = {cell["row"] for cell in summary["cells"] if "value" in cell}
    summary["cells"] = [cell for cell in summary["cells"] if cell["row"] in rows]
    return f"{found['begin']}\n{table_of(summary).markdown()}\n\n{found['end']}"


def _compared(found: re.Match[str], folder: Path) -> str:
    """Pairs of rows of a published table, each on the images that both were attacked on."""
    cells = {(cell["column"], cell["row"]): cell for cell in _published(found, folder)["cells"]}
    rows = []
    for line in found["lines"].splitlines():
        column, _, pair = line.partition(":")
        records = []
        for row in (names := [name.strip() for name in pair.split("|")]):
            file = record_of(cells[column, row], folder / "paper") if (column, row) in cells else None
            if len(names) != 2 or file is None or not file.is_file():
                raise ConfigurationError(
                    f'expected "COLUMN: ROW | ROW" of {found["name"]} with records of both, got {line!r}'
                )
            records.append(read_result(file))
        numbers = paired_cells(records[0], records[1], ("adversarial",))
        rows.append((Cell(column), *map(Cell, names), *numbers))
    table = Table("On the same images", ("attack", "A", "B", "A %", "B %", "B - A", "images"), tuple(rows))
    return f"{found['begin']}\n{table.markdown()}\n\n{found['end']}"


def _published(found: re.Match[str], folder: Path) -> dict[str, Any]:
    summary = load_summary(Workspace(folder / "paper"), found["scale"], found["name"])
    if summary is None:
        raise ConfigurationError(
            f"expected {found['name']} at scale {found['scale']} in {folder / 'paper'}, got none; "
            "`menet publish` puts it there"
        )
    return summary
