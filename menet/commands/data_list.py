"""`menet data list`: which datasets there are, and which of them are here."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from menet.data.catalog import SOURCES, Source
from menet.data.places import data_folder


@dataclass(frozen=True)
class DataList:
    """List the datasets: whether and where they are here, how large, and under which terms."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    def __call__(self) -> int:
        place = data_folder(self.root)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("name", "here", "images", "classes", "size", "licence"):
            table.add_column(column, justify="right" if column in ("images", "classes", "size") else "left")
        for source in SOURCES.values():
            table.add_row(*_row(source, place / source.name))
        console = Console(highlight=False)
        console.print(table)
        console.print(
            f"\nEach has its folder in {place} (set MENET_DATA for another place).\n"
            "Images are counted as published, training+test; `menet data verify NAME` compares.\n"
            "Get one: `menet data fetch NAME`, or `menet data import NAME PATH` for files you have.",
            soft_wrap=True,
        )
        return 0


def _row(source: Source, place: Path) -> tuple[str, ...]:
    images = "+".join(f"{count:,}" for count in source.images) if source.images else "any"
    here = place.is_dir() and not source.embedded
    return (
        source.name,
        "built in" if source.embedded else "yes" if here else "no",
        images,
        str(source.classes or "any"),
        f"{_bytes_in(place) / 1e6:,.0f} MB" if here else "",
        source.licence,
    )


def _bytes_in(folder: Path) -> int:
    return sum(os.path.getsize(Path(place) / name) for place, _, names in os.walk(folder) for name in names)
