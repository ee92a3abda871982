"""The commands, one file each: a frozen dataclass whose fields are the options and whose call runs it.

Modules import what is heavy (torch above all) inside `__call__`, so that help and errors come at once.

Here is what a command prints: words and tables to read, or the same as JSON, CSV or LaTeX for other programs. In
a format for programs, standard output holds the document and nothing else; words and progress go to standard
error. A command that fails prints no document.
"""

import functools
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from menet.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from menet.report import Table

Json = Annotated[bool, tyro.conf.arg(help="Print one JSON document; words go to standard error.")]
Csv = Annotated[bool, tyro.conf.arg(help="Print the tables as CSV; words go to standard error.")]
Latex = Annotated[bool, tyro.conf.arg(help="Print the tables as LaTeX (booktabs); words go to standard error.")]

FORMATS = ("json", "csv", "latex")
Command = TypeVar("Command")


class Output:
    """Collects the tables and values of one command."""

    def __init__(self, command: str, format: str | None = None) -> None:
        self.command, self.format = command, format
        self.tables: list[Table] = []
        self.values: dict[str, Any] = {}

    def table(self, table: "Table", console: "Console | None" = None, *, lines: bool = True) -> None:
        """Show a table now, or keep it for the document."""
        if self.format is None:
            table.print(console, lines=lines)
        else:
            self.tables.append(table)

    def value(self, **values: Any) -> None:
        """Add plain values to the JSON document; the words that a person reads are printed as usual."""
        self.values.update(values)

    def document(self) -> str:
        """Everything collected, in the chosen format."""
        if self.format == "json":
            tables = {"tables": [table.plain() for table in self.tables]} if self.tables else {}
            content = {"command": self.command, **self.values, **tables}
            return json.dumps(content, indent=1, ensure_ascii=False, default=str)
        return "\n".join(getattr(table, str(self.format))() for table in self.tables).rstrip("\n")


def printing(call: Callable[[Command, Output], int]) -> Callable[[Command], int]:
    """Give a command's `__call__` its `Output`, in the format that the options `json`, `csv` and `latex` choose.

    A process that shares its work with others, and leaves the end to them, has nothing to print.
    """

    @functools.wraps(call)
    def wrapped(self: Command) -> int:
        chosen = [name for name in FORMATS if getattr(self, name, False)]
        if len(chosen) > 1:
            raise ConfigurationError(f"expected one output format, got --{' and --'.join(chosen)}")
        name = " ".join(re.findall("[A-Z][a-z]*", type(self).__name__)).lower()
        out = Output(name, chosen[0] if chosen else None)
        if out.format is None:
            return call(self, out)
        with redirect_stdout(sys.stderr):
            code = call(self, out)
        if out.tables or out.values:
            print(out.document())
        return code

    return wrapped
