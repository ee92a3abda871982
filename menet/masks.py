"""Which entries are observed: Bernoulli masks, cells of partitions, the paper's schedules, fixed banks."""

import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from menet.errors import ConfigurationError


def bernoulli(
    shape: Sequence[int],
    p: float | Tensor,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "..."]:
    """A mask of `shape` whose entries are True (observed) independently with probability `p`.

    `p` is a number or a tensor of one probability per leading entry of `shape` (per image). The mask is drawn on
    the generator's device and moved to `device` (by default the generator's), so that a generator on the CPU
    gives the same masks for images on any device.
    """
    device = torch.device(device) if device is not None else generator.device
    probability = torch.as_tensor(p, dtype=torch.float32, device=generator.device)
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ConfigurationError(f"expected 0 <= p <= 1, got {_show(p)}")
    if probability.ndim:
        if probability.shape != tuple(shape[: probability.ndim]):
            raise ConfigurationError(
                f"expected p to be a number or one probability per leading entry of {tuple(shape)}, "
                f"got shape {tuple(probability.shape)}"
            )
        probability = probability.reshape(*probability.shape, *[1] * (len(shape) - probability.ndim))
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device)
    return (uniform < probability).to(device)


def schedule(a: float, b: float, n: int = 10) -> tuple[float, ...]:
    """The paper's `p: a→b` with n masks: n probabilities from `a` in equal steps of (b − a)/n.

    `schedule(0.6, 0.8, 10)` is 0.60, 0.62, …, 0.78 (Appendix B of the paper).
    """
    if not (0 <= a <= b <= 1):
        raise ConfigurationError(f"expected a schedule a→b with 0 <= a <= b <= 1, got {a}→{b}")
    if n < 1:
        raise ConfigurationError(f"expected n >= 1, got {n}")
    return tuple(a + (b - a) * step / n for step in range(n))


def bank(
    count: int,
    shape: Sequence[int],
    p: float | Sequence[float],
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "count ..."]:
    """`count` fixed masks of `shape`; several probabilities are used in turn."""
    if count < 1:
        raise ConfigurationError(f"expected count >= 1, got {count}")
    values = [float(p)] if isinstance(p, (int, float)) else [float(value) for value in p]
    if not values:
        raise ConfigurationError("expected one or more probabilities, got none")
    per_mask = torch.tensor((values * math.ceil(count / len(values)))[:count], device=generator.device)
    return bernoulli((count, *shape), per_mask, generator, device)


def partitions(
    count: int, cells: int, shape: tuple[int, int], generator: torch.Generator
) -> Int[Tensor, "count h w"]:
    """`count` random partitions of an image's pixels into `cells`, each spread evenly: the cell of each pixel.

    Runs of `cells` pixels along a curve that keeps neighbors together have one pixel in each cell, so a cell has
    one random pixel in each small patch of the image. So few pixels show more than as many drawn independently.
    Cells differ in size by at most two pixels.
    """
    height, width = shape
    if count < 1 or not 1 <= cells <= height * width:
        raise ConfigurationError(
            f"expected count >= 1 and 1 <= cells <= {height * width}, the pixels, got {count} and {cells}"
        )
    order = curve(height, width)
    found = torch.empty(count, len(order), dtype=torch.int64)
    runs = len(order) // cells + 2
    for partition in found:
        offset = int(torch.randint(cells, (), generator=generator))
        shuffled = torch.rand(runs, cells, generator=generator).argsort(1).flatten()
        partition[order] = shuffled[offset : offset + len(order)]
    return found.view(count, height, width)


def lattices(count: int, cells: int, shape: tuple[int, int]) -> Int[Tensor, "count h w"]:
    """`count` partitions of an image's pixels into `cells` shifted copies of a lattice: the cell of each pixel.

    Of all lattices with so many shifts those come first whose closest points are farthest apart: of 25 cells the
    pixels 5 apart in rows and columns, then skewed ones. Nothing is random.
    """
    height, width = shape
    found = _lattices(cells)
    if not 1 <= count <= len(found) or not 1 <= cells <= height * width:
        raise ConfigurationError(
            f"expected 1 <= cells <= {height * width}, the pixels, and 1 <= count <= {len(found)}, the lattices "
            f"of {cells} cells, got {cells} and {count}"
        )
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    layers = [
        rows % step * period + (columns - rows // step * skew) % period for step, skew, period in found[:count]
    ]
    return torch.stack(layers)


@functools.lru_cache(maxsize=64)
def _lattices(cells: int) -> tuple[tuple[int, int, int], ...]:
    """All (step, skew, period) with step · period = cells, widest apart first.

    The lattice has the points (step, skew) and (0, period) as a basis (rows, columns), its Hermite normal form.
    """

    def apart(step: int, skew: int, period: int) -> int:
        """The squared length of the shortest vector of the lattice."""
        shortest = period**2
        for times in range(1, math.isqrt(cells) + 2):
            column = times * skew % period
            shortest = min(shortest, (times * step) ** 2 + min(column, period - column) ** 2)
        return shortest

    every = [
        (step, skew, cells // step)
        for step in range(1, cells + 1)
        if cells % step == 0
        for skew in range(cells // step)
    ]
    return tuple(sorted(every, key=lambda one: (-apart(*one), one)))


def lines(shape: tuple[int, int]) -> Int[Tensor, "2 h w"]:
    """Two partitions of a square image, into columns and into rows: a w×w patch reaches w cells of each."""
    height, width = shape
    if height != width:
        raise ConfigurationError(f"expected a square image, got {height}×{width}")
    columns = torch.arange(width).expand(height, width)
    return torch.stack([columns, columns.T])


def random_cells(
    p: Float[Tensor, " b"], shape: tuple[int, int], generator: torch.Generator
) -> Bool[Tensor, "b 1 h w"]:
    """For each image a random cell of a random partition into round(1/p) cells, as `partitions` makes them."""
    height, width = shape
    order, pixels = curve(height, width), height * width
    if not bool(((p > 0) & (p <= 1)).all()):
        raise ConfigurationError(f"expected 0 < p <= 1 for cells, got {_show(p)}")
    cells = (1 / p.double()).round().clamp(max=pixels).long()[:, None]
    runs = torch.arange(pixels // int(cells.min()) + 2 if len(p) else 0)
    offset = (torch.rand(len(p), 1, dtype=torch.float64, generator=generator) * cells).long()
    chosen = (torch.rand(len(p), len(runs), dtype=torch.float64, generator=generator) * cells).long()
    place = runs * cells - offset + chosen
    inside = (place >= 0) & (place < pixels)
    mask = torch.zeros(len(p), pixels + 1, dtype=torch.bool)
    # What falls beside the image goes to a column that is cut off.
    mask.scatter_(1, torch.where(inside, order[place.clamp(0, pixels - 1)], pixels), True)
    return mask[:, :pixels].reshape(-1, 1, height, width)


@functools.lru_cache(maxsize=8)
def curve(height: int, width: int) -> Int[Tensor, " pixels"]:
    """The pixels, numbered row by row, in the order in which a Hilbert curve visits them."""
    side = 1 << (max(height, width) - 1).bit_length()
    at = torch.arange(side * side)
    x, y = torch.zeros_like(at), torch.zeros_like(at)
    size = 1
    while size < side:
        right = (at // 2) & 1
        up = (at ^ right) & 1
        flipped = (up == 0) & (right == 1)
        x, y = torch.where(flipped, size - 1 - x, x), torch.where(flipped, size - 1 - y, y)
        x, y = torch.where(up == 0, y, x) + size * right, torch.where(up == 0, x, y) + size * up
        at, size = at // 4, 2 * size
    inside = (y < height) & (x < width)
    return (y * width + x)[inside]


def of_examples(
    examples: Int[Tensor, " b"],
    numbers: Int[Tensor, " b"],
    p: Float[Tensor, " b"],
    shape: Sequence[int],
    seed: int = 0,
) -> Bool[Tensor, "b ..."]:
    """Mask `numbers[i]` of example `examples[i]` among the fixed masks of its own, with probability `p[i]`.

    The same whenever and wherever it is asked for, without being stored: SplitMix64 of seed, example, number
    and entry.
    """
    key = _mixed(_mixed(examples + GAMMA * seed) + GAMMA * (numbers + 1))
    entries = torch.arange(1, math.prod(shape) + 1, device=examples.device)
    uniform = ((_mixed(key[:, None] + GAMMA * entries) >> 40) & 0xFFFFFF) / 2**24
    return (uniform < p[:, None]).unflatten(1, tuple(shape))


GAMMA = 0x9E3779B97F4A7C15 - 2**64


def _mixed(state: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014); 64-bit integers of torch wrap around."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ ((state >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return state ^ ((state >> 31) & (2**33 - 1))


def _show(p: float | Tensor) -> str:
    if isinstance(p, Tensor) and p.numel() > 1:
        return f"values from {float(p.min()):g} to {float(p.max()):g}"
    return f"{float(p):g}"
