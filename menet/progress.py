"""Progress of long work: a live bar in a terminal, otherwise a plain line every ten seconds."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0


class Reporter:
    """Shows progress: `advance(n, loss=…, accuracy=…)`; the given numbers are shown after the bar.

    `skip(n)` is for what was done before, which says nothing about the speed, and `expect(total)` for a better
    estimate of the whole.
    """

    def __init__(self, description: str, total: float | None, stream: TextIO) -> None:
        self.description, self.total, self.stream = description, total, stream
        self.done = self.skipped = 0.0
        self.started = self.last_line = time.monotonic()

    def advance(self, steps: float = 1, **shown: float | str) -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            rate = self.rate
            goal = f"/{_count(self.total)}" if self.total else ""
            left = f", {format_duration((self.total - self.done) / rate)} left" if self.total and rate else ""
            words = "".join(f", {word}" for word in _words(shown))
            print(f"{self.description}: {_count(self.done)}{goal}{left}{words}", file=self.stream, flush=True)

    def skip(self, steps: float) -> None:
        self.skipped += steps
        self.done += steps

    def expect(self, total: float) -> None:
        self.total = total

    @property
    def rate(self) -> float:
        """Steps in a second."""
        return (self.done - self.skipped) / max(time.monotonic() - self.started, 1e-9)


class _Bar(Reporter):
    def __init__(self, description: str, total: float | None, stream: TextIO, bar: Progress) -> None:
        super().__init__(description, total, stream)
        self.bar = bar
        self.task = bar.add_task(description, total=total, shown="")

    def advance(self, steps: float = 1, **shown: float | str) -> None:
        self.done += steps
        self.bar.update(self.task, advance=steps, shown="  ".join([f"{self.rate:.3g}/s", *_words(shown)]))

    def skip(self, steps: float) -> None:
        super().skip(steps)
        self.bar.reset(self.task, completed=int(self.done))

    def expect(self, total: float) -> None:
        super().expect(total)
        self.bar.update(self.task, total=total)


@contextmanager
def reporting(description: str, total: float | None = None, stream: TextIO | None = None) -> Iterator[Reporter]:
    """A `Reporter` inside a `with` block, on standard error by default."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield Reporter(description, total, stream)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        yield _Bar(description, total, stream, bar)


def track(items: Iterable[T], description: str, total: float | None = None) -> Iterator[T]:
    """Iterate over `items` and show the progress."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with reporting(description, total) as reporter:
        for item in items:
            yield item
            reporter.advance()


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:g}"


def _words(shown: dict[str, float | str]) -> list[str]:
    return [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    ]


def format_duration(seconds: float) -> str:
    """Seconds in the largest units that fit: `12.3 s`, `5 min 3 s`, `3 h 20 min`, `4 days`."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
