"""Going through a range of examples batch by batch, so that it can be killed, continued and shared."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.evaluation.records import Row, Shard, present
from menet.progress import reporting


def range_of(start: int, stop: int | None, length: int) -> range:
    """The examples `start` to `stop` (to the end if None) of `length`, at least one."""
    end = length if stop is None else stop
    if not 0 <= start < end <= length:
        raise ConfigurationError(f"the range is {start} to {end}; accepted are ranges within 0 to {length}")
    return range(start, end)


def work_through(
    examples: range,
    batch: int,
    make: Callable[[int, int], list[Row]],
    shard: Shard,
    folder: Path,
    label: str,
    place: Worker,
    shown: Callable[[list[Row]], dict[str, float | str]],
) -> None:
    """Append the rows that `make(start, stop)` makes, for this process's examples that have none yet.

    Batches lie at multiples of `batch`, whatever the range, and `make` is given stretches inside one batch.
    """
    own = [index for index in examples if index // batch % place.world == place.rank]
    done = present(folder, label)
    title = label + (f" [{place.rank}]" if place.world > 1 else "")
    with reporting(title, len(own)) as progress:
        progress.advance(len(done.intersection(own)))
        for start, stop in _stretches([index for index in own if index not in done], batch):
            rows = [row for row in make(start, stop) if row["index"] not in done]
            shard.append(rows)
            progress.advance(len(rows), **shown(rows))


def _stretches(indices: Sequence[int], batch: int) -> Iterator[tuple[int, int]]:
    grouped: dict[int, list[int]] = {}
    for index in indices:
        grouped.setdefault(index // batch, []).append(index)
    for group in grouped.values():
        yield group[0], group[-1] + 1
