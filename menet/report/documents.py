"""Results in documents: tables and numbers between the markers of Markdown files, so that none is typed there.

A table stands on lines of its own, a number in the middle of a sentence:

    <!-- budgets mnist -->
    …
    <!-- /budgets -->
    ME-Net keeps <!-- number mnist/menet-adversarial robust -->18.2 % (11.6–26.4)<!-- /number --> of them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from menet.errors import ConfigurationError
from menet.evaluation.accuracy import Criterion, Images, accuracy, paired_difference
from menet.evaluation.records import Records
from menet.evaluation.results import read_result
from menet.experiments.jobs import Workspace
from menet.experiments.plan import load_summary
from menet.files import write_atomically
from menet.report import Cell, Table, board
from menet.report.accuracy_tables import brief_table, results_table
from menet.report.narrative import tenth
from menet.report.reproduction import record_of, table_of
from menet.report.results import (
    Entry,
    budgets_table,
    main_threats,
    on_shared_examples,
    paired_cells,
    paired_table,
)

BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>results|budgets|paired|compared|reproduced)(?P<what>[^>]*?)-->\n).*?"
    r"(?P<end><!-- /(?P=kind) -->)",
    re.S,
)
"""Around a table:

- `results`, or `results NAME …` with only the models of these names: the worst case over attacks of each model.
- `budgets DATASET`: models that were attacked under several threat models.
- `paired A B, A B, …`: two models on the same images.
- `reproduced EXPERIMENT SCALE`: what is measured of a table of `menet reproduce`.
- `compared EXPERIMENT SCALE`, then lines of `COLUMN: ROW | ROW`: rows of such a table on the same images.
"""
INLINE = re.compile(
    r"(?P<begin><!-- (?P<kind>number|value|paper|gap) (?P<what>[^>\n]+?) -->)[^\n]*?(?P<end><!-- /(?P=kind) -->)"
)
"""Around a number:

- `number MODEL clean|robust|vote|worst [ATTACK]`: an accuracy of a model with its interval, of the attack that
  decided unless one is named as in RESULTS.md; or `number EXPERIMENT SCALE COLUMN: ROW` of a reproduced table.
- `value …`: the same without its interval.
- `paper EXPERIMENT SCALE COLUMN: ROW`: the paper's number for a cell.
- `gap A B clean|robust [ATTACK]`: B minus A on the same images, in points, of the attack on B that decided unless
  one is named; or `gap EXPERIMENT SCALE COLUMN: A | B`.
"""
CRITERIA: dict[str, tuple[Images, Criterion]] = {
    "clean": ("clean", "expected"),
    "robust": ("adversarial", "expected"),
    "vote": ("adversarial", "vote"),
    "worst": ("adversarial", "worst"),
}


def fill_results(file: Path, folder: Path) -> Path:
    """Put what the compact results in `folder` say between the markers of a Markdown file."""
    text = file.read_text(encoding="utf-8")
    if not (BLOCK.search(text) or INLINE.search(text)):
        raise ConfigurationError(f"expected <!-- results --> and <!-- /results --> in {file}, got none")
    results = _Results(folder)
    text = BLOCK.sub(lambda found: f"{found['begin']}\n{results.table(found)}\n\n{found['end']}", text)
    text = INLINE.sub(lambda found: f"{found['begin']}{results.phrase(found)}{found['end']}", text)
    write_atomically(file, text)
    return file


@dataclass(frozen=True)
class _Results:
    """The published results in a folder, read once for all markers of a document."""

    folder: Path
    summaries: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def entries(self) -> list[Entry]:
        return board.entries(self.folder)

    @cached_property
    def usual(self) -> dict[str, Entry]:
        """By name, each model under the threat model of most models of its dataset."""
        main = main_threats(self.entries)
        return {entry.name: entry for entry in self.entries if entry.threat == main[entry.dataset]}

    def table(self, found: re.Match[str]) -> str:
        tables: dict[str, Callable[[str], Table]] = {
            "results": self._main,
            "budgets": lambda what: budgets_table(
                [entry for entry in self.entries if entry.dataset == what.strip()]
            ),
            "paired": self._paired,
            "compared": self._compared,
            "reproduced": self._reproduced,
        }
        return tables[found["kind"]](found["what"]).markdown()

    def phrase(self, found: re.Match[str]) -> str:
        what = found["what"]
        if found["kind"] == "gap":
            return self._gap(what)
        if found["kind"] == "paper":
            return f"{tenth(self._cell(what)['claimed'] / 100)} %"
        if "/" in what.split()[0]:
            value, low, high = self._measured(what)
        else:
            cell = self._cell(what)
            value, low, high = (cell[name] / 100 for name in ("value", "low", "high"))
        interval = f" ({tenth(low)}–{tenth(high)})" if found["kind"] == "number" else ""
        return f"{tenth(value)} %{interval}"

    def _main(self, what: str) -> Table:
        """The worst case of every model, or in short of those of some names."""
        names = what.split()
        lines = [
            line
            for line in board.rows(list(self.usual.values()))
            if not names or line["name"].rpartition("/")[2] in names
        ]
        return brief_table(lines) if names else results_table(lines)

    def _paired(self, what: str) -> Table:
        pairs = [tuple(pair.split()) for pair in what.split(",")]
        if not all(len(pair) == 2 for pair in pairs):
            raise ConfigurationError(f"expected two names of results in each pair, got {what.strip()!r}")
        return paired_table(self.entries, [(pair[0], pair[1]) for pair in pairs])

    def _reproduced(self, what: str) -> Table:
        """The rows of a published table that have numbers."""
        summary = self._summary(*what.split())
        rows = {cell["row"] for cell in summary["cells"] if "value" in cell}
        return table_of({**summary, "cells": [cell for cell in summary["cells"] if cell["row"] in rows]})

    def _compared(self, what: str) -> Table:
        """Pairs of rows of a published table, each on the images that both were attacked on."""
        names, *lines = what.strip().splitlines()
        rows = []
        for line in lines:
            one, other = self._pair(names, line)
            column, _, pair = line.partition(":")
            numbers = paired_cells(one, other, ("adversarial",))
            rows.append((Cell(column), *(Cell(name.strip()) for name in pair.split("|")), *numbers))
        return Table("On the same images", ("attack", "A", "B", "A %", "B %", "B - A", "images"), tuple(rows))

    def _gap(self, what: str) -> str:
        images: Images = "adversarial"
        first = what.split()
        if "/" in first[0]:
            if len(first) < 3 or first[2] not in ("clean", "robust"):
                raise ConfigurationError(f"expected `gap A B clean` or `gap A B robust`, got {what!r}")
            one, other = self._attack(first[0]), self._attack(first[1], " ".join(first[3:]))
            images = CRITERIA[first[2]][0]
        else:
            one, other = self._pair(" ".join(first[:2]), " ".join(first[2:]))
        found = paired_difference(*on_shared_examples(one, other), images)
        return f"{100 * found.value:+.1f} ± {100 * found.margin:.1f}"

    def _measured(self, what: str) -> tuple[float, float, float]:
        name, _, rest = what.partition(" ")
        criterion, _, label = rest.partition(" ")
        if criterion not in CRITERIA:
            raise ConfigurationError(f"expected one of {', '.join(CRITERIA)} after {name}, got {criterion!r}")
        found = accuracy(self._attack(name, label), *CRITERIA[criterion])
        return found.value, found.low, found.high

    def _attack(self, name: str, label: str = "") -> Records:
        """The attack on a model that has this label; without one that which decided."""
        if name not in self.usual:
            raise ConfigurationError(
                f"expected the name of a result, got {name!r}; there is {', '.join(self.usual)}"
            )
        if not label:
            return self.usual[name].decisive
        of_the_model = [entry for entry in self.entries if entry.name == name]
        every = {one.label: one for entry in of_the_model for one in (*entry.evaluations, *entry.frozen)}
        if label not in every:
            raise ConfigurationError(f"expected an attack on {name}, got {label!r}; there is {', '.join(every)}")
        return every[label]

    def _cell(self, what: str) -> dict[str, Any]:
        """A measured cell of a published table: `EXPERIMENT SCALE COLUMN: ROW`."""
        name, scale, place = (*what.split(maxsplit=2), "", "")[:3]
        column, _, row = place.partition(": ")
        for cell in self._summary(name, scale)["cells"]:
            if (cell["column"], cell["row"]) == (column, row) and "value" in cell:
                return dict(cell)
        raise ConfigurationError(f'expected "EXPERIMENT SCALE COLUMN: ROW" of a measured cell, got {what!r}')

    def _pair(self, names: str, line: str) -> tuple[Records, Records]:
        """The records of two cells of one column: `COLUMN: ROW | ROW`."""
        column, _, pair = line.partition(":")
        cells = {(cell["column"], cell["row"]): cell for cell in self._summary(*names.split())["cells"]}
        rows = [row.strip() for row in pair.split("|")]
        there = [cells[column, row] for row in rows if (column, row) in cells]
        files = [file for cell in there if (file := record_of(cell, self.folder / "paper")).is_file()]
        if len(rows) != 2 or len(files) != 2:
            raise ConfigurationError(
                f'expected "COLUMN: ROW | ROW" of {names.split()[0]} with records of both, got {line!r}'
            )
        return read_result(files[0]), read_result(files[1])

    def _summary(self, name: str, scale: str) -> dict[str, Any]:
        if (name, scale) not in self.summaries:
            summary = load_summary(Workspace(self.folder / "paper"), scale, name)
            if summary is None:
                raise ConfigurationError(
                    f"expected {name} at scale {scale} in {self.folder / 'paper'}, got none; "
                    "`menet publish` puts it there"
                )
            self.summaries[name, scale] = summary
        return self.summaries[name, scale]
