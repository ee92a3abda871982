"""Completion along a path of λ, from where the estimate is zero down, and its choice by held-out entries.

Each λ starts at the estimate of the one before, so that a whole path costs little more than its last value alone.
Dense batches are solved at once; sparse and large matrices by factors (`large.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from menet import kernels, linalg
from menet.errors import ConfigurationError
from menet.estimators import newton, solver
from menet.estimators.base import Effects, check_stopping, checked
from menet.estimators.entries import Completion, Entries, observed_entries
from menet.estimators.large import complete

COUNT = 20
SMALLEST_FRACTION = 1e-2
TOLERANCE = 1e-2
FOLD_TOLERANCE = 0.1
"""Held-out errors need less: on a 200×100 table they are within 3 % of the exact ones, with the same choice."""
ITERATIONS = 1000


class Path(NamedTuple):
    """The λ of each matrix, falling, and for each of them the estimate, iterations and rank."""

    lambdas: Float[Tensor, "*batch values"]
    estimates: Float[Tensor, "*batch values m n"]
    iterations: Tensor
    ranks: Tensor


class CrossValidation(NamedTuple):
    """For each λ the root mean square error on held-out entries, its standard error, the mean rank; the choice.

    `best` is the λ of the lowest error and `simplest` the largest one within a standard error of it; one for each
    matrix, or one for all.
    """

    lambdas: Tensor
    errors: Tensor
    standard_errors: Tensor
    ranks: Tensor
    best: Tensor
    simplest: Tensor


def path(
    x: Tensor,
    mask: Tensor,
    lambdas: Sequence[float] | Tensor | None = None,
    *,
    count: int = COUNT,
    smallest: float = SMALLEST_FRACTION,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
) -> Path:
    """The minimizers of  ½‖mask∘(X − x)‖² + λ‖X‖_*  for several λ, from the largest down.

    `lambdas` is `(values,)`, or `(..., values)` with its own for each matrix; by default `count` of them in
    geometric sequence, from the λ where X = 0 to the fraction `smallest` of it. `tol` and `max_iter` are for each
    λ, as in `soft_impute`. Memory is that of all estimates; `cross_validate` keeps none. No gradients.
    """
    check_stopping(tol, max_iter, None)
    flat, seen = _flat(x, mask)
    levels = _levels(flat, lambdas, count, smallest, shared=False, batch=x.shape[:-2])

    def walk(flat: Tensor, seen: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
        steps = _walk(flat, seen, levels, tol, max_iter, proven=True)
        found = [(estimate.clone(), iterations, rank) for estimate, iterations, rank in steps]
        return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))

    turned = x.shape[-1] > x.shape[-2]
    estimates, iterations, ranks = linalg.in_chunks(
        walk, [linalg.tall(flat).contiguous(), linalg.tall(seen).contiguous(), levels]
    )
    solver.warn_unconverged(iterations.flatten())
    estimates = (estimates.mT if turned else estimates).to(x.dtype)
    batch, values = x.shape[:-2], levels.shape[-1]
    return Path(
        levels.reshape(*batch, values),
        estimates.reshape(*batch, values, *x.shape[-2:]),
        iterations.abs().reshape(*batch, values),
        ranks.reshape(*batch, values),
    )


def cross_validate(
    x: Tensor,
    mask: Tensor,
    lambdas: Sequence[float] | Tensor | None = None,
    *,
    generator: torch.Generator,
    folds: int = 5,
    shared: bool = False,
    count: int = COUNT,
    smallest: float = SMALLEST_FRACTION,
    tol: float = FOLD_TOLERANCE,
    max_iter: int = ITERATIONS,
) -> CrossValidation:
    """Choose λ by the error on held-out entries: the observed ones are divided at random into `folds` parts.

    All folds of all matrices are one batch along one path. With `shared` one λ is chosen for the whole batch, by
    the error over all of it; otherwise one for each matrix. `lambdas`, `count` and `smallest` are as in `path`.
    """
    check_stopping(tol, max_iter, None)
    flat, seen = _flat(x, mask)
    fewest = int(seen.sum((1, 2)).min()) if len(seen) else 0
    _check_folds(folds, fewest)
    levels = _levels(flat, lambdas, count, smallest, shared, x.shape[:-2])
    # Entries in random order, the unobserved ones last; every folds-th of them is in the same fold.
    keys = torch.rand(flat.shape, generator=generator, dtype=torch.float64).to(flat.device) + ~seen
    order = keys.flatten(1).argsort(1)
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=flat.device).expand_as(order)
    )
    fold = (place % folds).reshape(flat.shape)
    number = torch.arange(folds, device=flat.device)[None, :, None, None]
    held = (seen[:, None] & (fold[:, None] == number)).flatten(0, 1)
    repeated = flat.repeat_interleave(folds, 0)
    kept = seen.repeat_interleave(folds, 0) & ~held

    def score(flat: Tensor, kept: Tensor, held: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
        errors, ranks, missed = [], [], []
        # Single precision suffices; the solver takes double where a small λ needs it.
        scale = linalg.power_of_two(flat, (1, 2))
        flat, levels = (flat / scale).float(), (levels / scale[:, 0]).float()
        wrong = torch.empty_like(flat)
        for estimate, iterations, rank in _walk(flat * kept, kept, levels, tol, max_iter, proven=False):
            torch.sub(estimate, flat, out=wrong).mul_(held)
            error = torch.linalg.vector_norm(wrong, dim=(1, 2), dtype=torch.float64).square()
            errors.append(error * scale[:, 0, 0].square())
            ranks.append(rank)
            missed.append(iterations)
        return torch.stack(errors, 1), torch.stack(ranks, 1), torch.stack(missed, 1)

    tensors = [linalg.tall(part).contiguous() for part in (repeated, kept, held)]
    squares, ranks, iterations = linalg.in_chunks(score, [*tensors, levels.repeat_interleave(folds, 0)])
    solver.warn_unconverged(iterations.flatten())
    squares, counts = squares.reshape(-1, folds, levels.shape[1]), held.sum((1, 2)).reshape(-1, folds, 1)
    ranks = ranks.double().reshape(squares.shape)
    if shared:
        squares, counts, levels = squares.sum(0, keepdim=True), counts.sum(0, keepdim=True), levels[:1]
        ranks = ranks.mean(0, keepdim=True)
    chosen = _choose(levels, squares, counts, ranks)
    batch = () if shared else tuple(x.shape[:-2])
    return CrossValidation(*(part.reshape((*batch, *part.shape[1:])) for part in chosen))


def cross_validate_large(
    x: Any,
    mask: Any = None,
    lambdas: Sequence[float] | None = None,
    *,
    generator: torch.Generator,
    weights: Any = None,
    effects: Effects = "none",
    rank: int | None = None,
    folds: int = 5,
    count: int = COUNT,
    smallest: float = SMALLEST_FRACTION,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
) -> CrossValidation:
    """`cross_validate` for one large or sparse matrix, given as `complete` takes it, with weights and effects."""
    entries = observed_entries(x, mask, weights)
    _check_folds(folds, len(entries.values))
    levels = _given(lambdas)
    if levels is None:
        largest = complete(entries, effects=effects, rank=1, tol=1.0, max_iter=1).shrinkage * 50
        levels = torch.from_numpy(largest * smallest ** np.linspace(0, 1, count))
    levels = levels.sort(descending=True).values
    fold = torch.randperm(len(entries.values), generator=generator).numpy() % folds
    squares, ranks = torch.zeros(1, folds, len(levels)), torch.zeros(1, folds, len(levels))
    squares, ranks = squares.double(), ranks.double()
    rows = entries.rows
    for number in range(folds):
        held = fold == number
        for index, found in enumerate(
            path_large(
                entries.chosen(~held), levels.tolist(), effects=effects, rank=rank, tol=tol, max_iter=max_iter
            )
        ):
            error = found.at(rows[held], entries.columns[held]) - entries.values[held]
            scale = entries.weights[held] if len(entries.weights) else 1.0
            squares[0, number, index] = float((scale * error**2).sum())
            ranks[0, number, index] = found.rank
    counts = torch.from_numpy(np.bincount(fold, entries.weights if len(entries.weights) else None, folds))
    return CrossValidation(*(part[0] for part in _choose(levels[None], squares, counts[None, :, None], ranks)))


def path_large(
    x: Any,
    lambdas: Sequence[float],
    *,
    mask: Any = None,
    weights: Any = None,
    effects: Effects = "none",
    rank: int | None = None,
    tol: float = TOLERANCE,
    max_iter: int = ITERATIONS,
) -> Iterator[Completion]:
    """The completions of one large or sparse matrix for `lambdas`, falling, each starting at the one before."""
    entries: Entries = observed_entries(x, mask, weights)
    found = None
    for level in sorted(lambdas, reverse=True):
        found = complete(
            entries, None, level, effects=effects, rank=rank, tol=tol, max_iter=max_iter, start=found
        )
        yield found


def _walk(
    x: Tensor, mask: Tensor, levels: Tensor, tol: float, max_iter: int, proven: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Estimates, iterations (negative where the limit was reached) and ranks for each λ of one chunk.

    Where not `proven`, a singular value a little beyond λ may be missed, as long as it is outside the subspace of
    the others. The memory of an estimate is used again three values later.
    """
    # The last three estimates, in turns: new memory for each would cost as much as a step in a subspace.
    estimate, past, start = torch.zeros_like(x), [torch.zeros_like(x), torch.zeros_like(x)], torch.empty_like(x)
    norms = linalg.spectral_norm(x)
    last = [torch.full_like(norms, torch.inf)] * 3
    # While the rank is low, steps in a subspace suffice, from that of the λ before.
    suits = x.shape[-1] > kernels.LARGEST and kernels.suit(x, kernels.LARGEST_SOLVED)
    low = torch.full_like(norms, suits, dtype=torch.bool)
    sketch = solver.sketch(x)
    bases, sizes = x.new_zeros(len(x), *sketch.shape), torch.zeros_like(norms, dtype=torch.long)
    rank, grown = torch.zeros_like(norms, dtype=torch.long), torch.zeros_like(norms, dtype=torch.long)
    for threshold in levels.unbind(1):
        # Where λ is at least the norm of the matrix the estimate stays zero.
        above = torch.where(threshold < norms * (1 - 1e-12))[0]
        low &= rank + grown.clamp(min=0) + 4 <= len(sketch)
        _extrapolate(estimate, past, threshold, last, ~low, out=start)
        estimate, past, last = past[1].copy_(estimate), [estimate, past[0]], [threshold, *last[:2]]
        before = rank
        iterations, rank = torch.ones_like(rank), torch.zeros_like(rank)
        index = above[low[above]]
        if len(index):
            subspace, results = (sketch, bases, sizes), (estimate, iterations, rank)
            _in_subspace(x, mask, threshold, index, start, subspace, results, tol, max_iter, proven)
            low[index] = iterations[index] > 0
            above = above[~low[above]]
        if len(above):
            found, taken, _, _, values, _, scaled = solver.solve(
                *(x[above, None], mask[above, None], threshold[above], None, tol, max_iter),
                keep=True,
                start=start[above, None],
            )
            estimate[above] = found[:, 0]
            iterations[above], rank[above] = taken, (values > scaled[:, None] * (1 + 1e-9)).sum(1)
        grown = rank - before
        yield estimate, iterations, rank


def _in_subspace(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    index: Tensor,
    start: Tensor,
    subspace: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    tol: float,
    max_iter: int,
    proven: bool,
) -> None:
    """Solve some of the matrices by steps in a subspace; iterations are 0 where these do not suffice."""
    from menet.kernels.low_rank import warm_each

    steps = min(newton.LOW_RANK_STEPS, max_iter)
    settings = newton.LOW_RANK_TOLERANCE * tol, steps, solver.solvable(x.dtype, tol), proven
    precision = torch.finfo(x.dtype)
    tensors = x, mask, threshold.contiguous(), index, start, *subspace, *results
    warm_each(*(part.numpy() for part in tensors), settings, precision.eps, precision.tiny)


def _extrapolate(
    estimate: Tensor, past: list[Tensor], threshold: Tensor, last: list[Tensor], bend: Tensor, out: Tensor
) -> None:
    """Where the last estimates point to at the next λ: linearly or, where `bend`, along a parabola.

    Were everything observed, the estimate would change linearly with λ wherever the rank stays the same.
    """
    first, second, third = last
    line = ((first - threshold) / (second - first)).nan_to_num(0, 0, 0).clamp(0, 1)
    curve = line * ((second - threshold) / (third - first)).nan_to_num(0, 0, 0).clamp(0, 1)
    curve = torch.where(bend, curve, 0.0)
    # Newton's form: a straight line, and a multiple of how much the last two differ.
    ratio = ((second - first) / (third - second)).nan_to_num(0, 0, 0).clamp(0, 1)
    ahead, turned = (1 + line + curve)[:, None, None], (curve * ratio)[:, None, None]
    middle = (line + curve + curve * ratio)[:, None, None]
    torch.mul(estimate, ahead, out=out).addcmul_(middle, past[0], value=-1)
    if bool(bend.any()):
        out.addcmul_(turned, past[1])


def _choose(levels: Tensor, squares: Tensor, counts: Tensor, ranks: Tensor) -> tuple[Tensor, ...]:
    """The fields of `CrossValidation`, from sums of squares over `(batch, folds, values)`."""
    folds = squares.shape[1]
    means = squares / counts.clamp(min=1)
    pooled = squares.sum(1) / counts.sum(1).clamp(min=1)
    spread = means.std(1) / folds**0.5
    best = pooled.argmin(1, keepdim=True)
    limit = pooled.gather(1, best) + spread.gather(1, best)
    # λ fall, so the first one within the limit is the largest.
    simplest = (pooled <= limit).to(torch.uint8).argmax(1, keepdim=True)
    errors = pooled.sqrt()
    chosen = (levels.gather(1, place)[:, 0] for place in (best, simplest))
    return levels, errors, spread / (2 * errors).clamp(min=1e-300), ranks.mean(1), *chosen


def _flat(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    filled, seen = checked(x.detach(), mask, 2)
    flat = filled.double().reshape(-1, *x.shape[-2:])
    return flat, seen.reshape(flat.shape)


def _check_folds(folds: int, fewest: int) -> None:
    if folds < 2:
        raise ConfigurationError(f"expected folds >= 2, got {folds}")
    if folds > fewest:
        raise ConfigurationError(
            f"expected folds <= the number of observed entries, {fewest} in the emptiest matrix, got {folds}"
        )


def _given(lambdas: Sequence[float] | Tensor | None) -> Tensor | None:
    """The λ given, checked."""
    if lambdas is None:
        return None
    levels = torch.as_tensor(lambdas, dtype=torch.float64)
    if not levels.numel() or not bool((levels.isfinite() & (levels > 0)).all()):
        raise ConfigurationError(f"expected finite lambdas > 0, got {levels.tolist()}")
    return levels


def _levels(
    x: Tensor,
    lambdas: Sequence[float] | Tensor | None,
    count: int,
    smallest: float,
    shared: bool,
    batch: torch.Size,
) -> Tensor:
    """The λ of each matrix, falling: `(batch, values)`."""
    given = _given(lambdas)
    if given is not None:
        try:
            given = given.to(x.device).expand(*batch, given.shape[-1]).reshape(len(x), -1)
        except RuntimeError:
            raise ConfigurationError(
                f"expected lambdas of shape (values,) or {(*batch, 'values')}, got {tuple(given.shape)}"
            ) from None
        return given.sort(-1, descending=True).values
    if count < 2 or not 0 < smallest < 1:
        raise ConfigurationError(f"expected count >= 2 and smallest in (0, 1), got {count} and {smallest}")
    largest = linalg.largest_singular_value(x)
    if shared:
        largest = largest.amax().expand_as(largest)
    # Of a matrix of zeros every λ gives zero.
    largest = torch.where(largest > 0, largest, 1.0)
    return largest[:, None] * smallest ** torch.linspace(0, 1, count, dtype=x.dtype, device=x.device)
