"""Nuclear-norm completion of one large or sparse matrix, by factors and with a certificate.

    minimize over X, a, b:   ½ Σ w·(X + a·1ᵀ + 1·bᵀ − A)²  +  λ ‖X‖_*      (sum over the observed entries)

X is kept as `left @ right.T`, because ‖X‖_* is the least ½(‖left‖² + ‖right‖²) over such factors. Given one
factor, the other is a ridge regression for each of its rows: alternating minimization, here accelerated
(Anderson, 1965). λ falls from where X = 0 to its goal, and the rank grows by the leading singular vectors of the
residual where its spectral norm exceeds λ. A local minimum of the factored problem where it does not is the
minimum of the convex one, and the duality gap says how far from it X is. Nothing of the size of the whole matrix
is ever formed.
"""

import warnings
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.linalg
from threadpoolctl import ThreadpoolController

from menet.errors import ConfigurationError
from menet.estimators.base import FRACTION_OF_LARGEST, ConvergenceWarning, Effects, check_effects, check_stopping
from menet.estimators.entries import Array, Completion, Entries, Model, observed_entries, singular_values_of

GAP = 1e-3
SWEEPS = 500
# λ falls by this factor; how much of the spectrum is added at once; how many sweeps between two looks at the
# residual.
FALL = 0.25
BLOCK, LARGEST_BLOCK = 8, 32
ROUND = 20
# Anderson acceleration combines this many steps.
MEMORY = 6
# From this many singular values, relative to one over the fraction observed, majorization steps are taken.
MAJORIZE = 8
# With fewer entries the factors are small, and decompositions of them take longer with several threads.
ENTRIES_OF_ONE_THREAD = 1_000_000
# Rows and columns are solved in one pass where this many rows come on a column, and the Gram matrices of all
# columns have at most so many entries.
TALL, LARGEST_GRAMS = 4, 500_000


def complete(
    x: Any,
    mask: Any = None,
    shrinkage: float | None = None,
    *,
    weights: Any = None,
    effects: Effects = "none",
    rank: int | None = None,
    bounds: tuple[float, float] | None = None,
    tol: float = GAP,
    max_iter: int = SWEEPS,
    start: Completion | None = None,
) -> Completion:
    """Complete one matrix by  min ½Σ w·(X − x)² + λ‖X‖_*  over the observed entries, as factors.

    `x`, `mask` and `weights` are as in `observed_entries`: dense with NaN or a mask, or sparse. `shrinkage` is λ
    > 0; by default 1/50 of the smallest λ with X = 0. `effects` adds unpenalized effects of rows, columns or both
    to the model. `rank` limits the rank of X; the problem is then not convex, and `gap` only bounds what the
    limit costs. `bounds` clip what the completion returns (`constrained` keeps the estimate itself within
    bounds). Stops at a relative duality gap of `tol`, or with a `ConvergenceWarning` after `max_iter` sweeps.
    `start` is a completion of the same shape to begin at, as for the next λ of a path. In double precision on the
    CPU; memory is that of the entries, twice, and the factors.
    """
    check_stopping(tol, max_iter, None)
    check_effects(effects)
    if bounds is not None and not bounds[0] <= bounds[1]:
        raise ConfigurationError(f"expected bounds (low, high) with low <= high, got {bounds}")
    if rank is not None and rank < 1:
        raise ConfigurationError(f"expected rank >= 1, got {rank}")
    if shrinkage is not None and not 0 < shrinkage < np.inf:
        raise ConfigurationError(
            f"expected a finite shrinkage > 0, got {shrinkage}; instead of 0 take a small one"
        )
    entries = observed_entries(x, mask, weights)
    # The factor of the shorter side is the variable of the accelerated iteration.
    turned = entries.shape[1] > entries.shape[0]
    swapped: dict[str, Effects] = {"rows": "columns", "columns": "rows"}
    if turned:
        entries, effects = entries.transposed, swapped.get(effects, effects)
        start = None if start is None else _turn(start)
    with _controller().limit(limits=1 if len(entries.values) < ENTRIES_OF_ONE_THREAD else None, user_api="blas"):
        found = _Solver(entries, effects, rank, tol, max_iter).run(shrinkage, start)
    found = _turn(found) if turned else found
    return replace(found, effects=swapped.get(effects, effects) if turned else effects, bounds=bounds)


@cache
def _controller() -> Any:
    return ThreadpoolController()


def _turn(found: Completion) -> Completion:
    return replace(
        found,
        left=found.right,
        right=found.left,
        row_effects=found.column_effects,
        column_effects=found.row_effects,
    )


class _Solver(Model):
    """The iterations of `complete`."""

    def __init__(self, entries: Entries, effects: Effects, limit: int | None, tol: float, max_iter: int) -> None:
        super().__init__(entries, 1.0, effects)
        self.limit = min(*entries.shape, limit or min(entries.shape))
        self.tol, self.left_over, self.max_iter = tol, max_iter, max_iter
        self.steepest = float(entries.weights.max()) if len(entries.weights) else 1.0
        rows, columns = entries.shape
        weight = float(entries.weights.sum()) if len(entries.weights) else float(len(entries.values))
        # The curvature of the misfit along a pair of singular vectors whose entries are about equal.
        self.curvature = max(weight / (rows * columns), 1e-300)

    def run(self, shrinkage: float | None, start: Completion | None) -> Completion:
        rows, columns = self.entries.shape
        left, right = self.assemble(
            np.zeros((rows, 0)), np.zeros((columns, 0)), np.zeros(rows), np.zeros(columns)
        )
        if start is not None:
            left, right = self.assemble(start.left, start.right, start.row_effects, start.column_effects)
            kept = [*range(min(start.rank, self.limit)), start.rank, start.rank + 1]
            left, right = np.ascontiguousarray(left[:, kept]), np.ascontiguousarray(right[:, kept])
        self.fit_effects(left, right)
        largest = 0.0
        if start is None or shrinkage is None:
            zero = np.zeros_like(left[:, :-2]), np.zeros_like(right[:, :-2])
            self.residual(*((left, right) if start is None else self.assemble(*zero, left[:, -2], right[:, -1])))
            nothing = np.zeros((rows, 2)), np.zeros((columns, 2))
            largest = self.spectrum(*nothing, 1, self.tol).norm
        goal = largest * FRACTION_OF_LARGEST if shrinkage is None else float(shrinkage)
        # A λ beyond what double precision resolves.
        goal = max(goal, 1e-300)
        level = goal if start is not None else max(goal, FALL * largest)
        while True:
            self.shrinkage = level
            last = level <= goal
            if left.shape[1] > 2 and (start is None or start.shrinkage != level):
                # What another λ makes of the factors; only then can the residual tell which directions they lack.
                left, right = self.settle(left, right)
            left, right, objective, gap = self.descend(left, right, self.tol if last else 0.1)
            if last or self.left_over <= 0:
                break
            level = max(goal, level * FALL)
        if self.left_over <= 0 and gap > self.tol:
            warnings.warn(
                f"the completion did not converge in {self.max_iter} sweeps (relative gap {gap:.1e}); "
                "raise max_iter, loosen tol, or shrink more",
                ConvergenceWarning,
                stacklevel=3,
            )
        rank = left.shape[1] - 2
        return Completion(
            left=np.ascontiguousarray(left[:, :rank]),
            right=np.ascontiguousarray(right[:, :rank]),
            row_effects=left[:, rank].copy(),
            column_effects=right[:, rank + 1].copy(),
            shrinkage=goal,
            objective=objective,
            gap=gap,
            sweeps=self.max_iter - self.left_over,
        )

    def descend(self, left: Array, right: Array, tol: float) -> tuple[Array, Array, float, float]:
        """Minimize at the present λ: sweeps, and more directions while the residual has any, in turns."""
        precision, objective, gap = 0.1 * tol, np.nan, np.inf
        while True:
            self.fit_effects(left, right)
            misfit = self.residual(left, right)
            rank = left.shape[1] - 2
            found = self.spectrum(left, right, min(max(BLOCK, rank // 2), LARGEST_BLOCK), self.tol)
            lengths = singular_values_of(left[:, :rank], right[:, :rank])
            objective = misfit + self.shrinkage * float(lengths.sum())
            gap = self.gap(objective, found.norm)
            if gap <= tol or self.left_over <= 0:
                break
            # A pair that a gradient step would shrink to nothing goes at once: alternating minimization takes
            # ever smaller steps towards zero.
            falls = lengths + (found.along - self.shrinkage) / self.curvature <= 0
            if falls.any():
                left, right = (np.delete(side, np.flatnonzero(falls), axis=1) for side in (left, right))
                rank = left.shape[1] - 2
            grows = found.values > self.shrinkage * (1 + 0.3 * min(tol, 0.1))
            added = np.flatnonzero(grows)[: self.limit - rank]
            before = objective
            if len(added):
                scale = np.sqrt((found.values[added] - self.shrinkage) / self.curvature)
                left = np.insert(left, [rank] * len(added), found.left[:, added] * scale, axis=1)
                right = np.insert(right, [rank] * len(added), found.right[:, added] * scale, axis=1)
            left, right = self.sweep(*self.settle(left, right), precision)
            rank = left.shape[1] - 2
            if not (len(added) or falls.any()):
                objective = self.objective(left, right)
                # Nothing to add and nothing gained: more precision, until rounding or the limit on the rank ends
                # it.
                exhausted = precision <= 1e-12 or (rank == self.limit and precision <= 1e-3 * tol)
                if exhausted and objective > before * (1 - 1e-2 * tol):
                    break
                precision = max(0.1 * precision, 1e-13)
        return left, right, objective, gap

    def settle(self, left: Array, right: Array) -> tuple[Array, Array]:
        """Two plain sweeps, in which new directions find their length.

        Balanced factors of the same product have the least penalty.
        """
        for _ in range(2):
            self.alternate(left, right)
            left, right = _balanced(left, right, 1e-9)
            self.left_over -= 1
        return left, right

    def sweep(self, left: Array, right: Array, precision: float) -> tuple[Array, Array]:
        """Alternating ridge regressions until the step is relatively smaller than `precision`, accelerated."""
        rank = left.shape[1] - 2
        if not rank:
            return left, right
        # A majorization step costs less by a factor of the rank, and gains less by the fraction observed.
        rows, columns = self.entries.shape
        cheap = rank * len(self.entries.values) > MAJORIZE * rows * columns
        step_of = self.majorized if cheap else self.alternated
        points: list[Array] = []
        steps: list[Array] = []
        state = self.state(left, right, cheap)
        best, plain = np.inf, state
        for _ in range(ROUND):
            merit, moved = step_of(left, right, state)
            self.left_over -= 1
            if merit > best and points:
                # The combination went uphill: back to the plain step, and forget.
                points, steps, state = [], [], plain
                merit, moved = step_of(left, right, state)
            best, plain = merit, moved
            step = plain - state
            if np.linalg.norm(step) <= precision * np.linalg.norm(plain) or self.left_over <= 0:
                break
            points, steps = [*points[-MEMORY:], plain], [*steps[-MEMORY:], step]
            state = plain
            if len(steps) > 1:
                turns = np.stack([b - a for a, b in pairwise(steps)], axis=1)
                weights = np.linalg.lstsq(turns, step, rcond=1e-10)[0]
                state = plain - sum(
                    weight * (b - a) for weight, a, b in zip(weights, points, points[1:], strict=False)
                )
        self.restore(left, right, plain, cheap)
        self.solve(self.entries, left, right, self.free_left)
        return _balanced(left, right, 1e-9)

    def state(self, left: Array, right: Array, both: bool) -> Array:
        """The variable of the accelerated iteration: the right factor, or both, as one vector."""
        rank = left.shape[1] - 2
        parts = [left[:, self.free_left(rank)]] if both else []
        return np.concatenate([part.ravel() for part in (*parts, right[:, self.free_right(rank)])])

    def restore(self, left: Array, right: Array, state: Array, both: bool) -> None:
        """The inverse of `state`, in place."""
        rank = left.shape[1] - 2
        if both:
            free = self.free_left(rank)
            left[:, free] = state[: len(left) * len(free)].reshape(len(left), -1)
        right[:, self.free_right(rank)] = state[-len(right) * len(self.free_right(rank)) :].reshape(
            len(right), -1
        )

    def alternated(self, left: Array, right: Array, state: Array) -> tuple[float, Array]:
        """A ridge regression of each row, then of each column: the objective in between, and the new state."""
        self.restore(left, right, state, False)
        return self.alternate(left, right), self.state(left, right, False)

    def alternate(self, left: Array, right: Array) -> float:
        """A ridge regression of each row, then of each column, in place: the objective in between."""
        rank = left.shape[1] - 2
        rows, columns = self.entries.shape
        penalty = 0.5 * self.shrinkage * float(np.square(right[:, :rank]).sum())
        if rows >= TALL * columns and columns * (rank + 1) * (rank + 2) <= 2 * LARGEST_GRAMS:
            return penalty + self.alternate_at_once(left, right)
        found = self.solve(self.entries, left, right, self.free_left)
        self.solve(self.across, right, left, self.free_right)
        return penalty + found

    def alternate_at_once(self, left: Array, right: Array) -> float:
        """The same in one pass over the rows, without the penalty on `right`."""
        from menet.kernels.factors import alternate_rows

        rank, entries = left.shape[1] - 2, self.entries
        penalty = np.full(rank + self.of_rows, self.shrinkage)
        penalty[rank:] = 0.0
        first, second = np.tril_indices(len(penalty))
        table = right[:, first] * right[:, second]
        free = self.free_right(rank)
        one, two = np.tril_indices(len(free))

        def part(*arguments: Any) -> tuple[float, Array]:
            grams = np.zeros((len(right), len(one) + len(free)))
            found = alternate_rows(
                *(*arguments[:-2], left, right, table, penalty, rank, self.of_columns, grams), *arguments[-2:]
            )
            return found, grams

        parts = entries.over_rows(part, entries.values, entries.weights)
        sums = np.sum([grams for _, grams in parts], axis=0)
        gram = np.zeros((len(right), len(free), len(free)))
        gram[:, one, two] = gram[:, two, one] = sums[:, : len(one)]
        diagonal = np.arange(len(free))
        gram[:, diagonal[:rank], diagonal[:rank]] += self.shrinkage
        # The effect of a column without entries is zero.
        gram[:, diagonal, diagonal] += gram[:, diagonal, diagonal] == 0
        right[:, free] = np.linalg.solve(gram, sums[:, len(one) :, None])[:, :, 0]
        return sum(found for found, _ in parts)

    def majorized(self, left: Array, right: Array, state: Array) -> tuple[float, Array]:
        """The same with unobserved entries as in the model (Hastie et al., 2015): one Gram matrix for all."""
        rank = left.shape[1] - 2
        self.restore(left, right, state, True)
        found = 0.0
        for entries, one, other, free in (
            (self.entries, left, right, self.free_left(rank)),
            (self.across, right, left, self.free_right(rank)),
        ):
            product = np.empty_like(one)
            found = entries.residuals(one, other, self.residuals, product)
            found += (
                0.5 * self.shrinkage * float(np.square(left[:, :rank]).sum() + np.square(right[:, :rank]).sum())
            )
            gram = self.steepest * other[:, free].T @ other[:, free]
            penalty = np.diag(np.where(np.array(free) < rank, self.shrinkage, 0.0))
            target = product[:, free] + one[:, free] @ gram
            one[:, free] = scipy.linalg.solve(gram + penalty, target.T, assume_a="pos").T
        return found, self.state(left, right, True)

    def objective(self, left: Array, right: Array) -> float:
        rank = left.shape[1] - 2
        return self.residual(left, right) + self.shrinkage * float(
            singular_values_of(left[:, :rank], right[:, :rank]).sum()
        )

    def fit_effects(self, left: Array, right: Array) -> None:
        """Minimize over the effects alone, so that the residual sums to zero as the dual problem asks."""
        rank = left.shape[1] - 2
        if self.of_rows and self.of_columns:
            for _ in range(200):
                before = right[:, rank + 1].copy()
                self.solve(self.entries, left, right, lambda rank: [rank])
                self.solve(self.across, right, left, lambda rank: [rank + 1])
                if np.abs(right[:, rank + 1] - before).max() <= 1e-12 * np.abs(before).max():
                    break
        elif self.of_rows:
            self.solve(self.entries, left, right, lambda rank: [rank])
        elif self.of_columns:
            self.solve(self.across, right, left, lambda rank: [rank + 1])


def _balanced(left: Array, right: Array, negligible: float) -> tuple[Array, Array]:
    """The same product by factors with orthogonal columns of equal lengths, without negligible ones."""
    rank = left.shape[1] - 2
    if not rank:
        return left, right
    (base, small), (other, inner) = (np.linalg.qr(side[:, :rank]) for side in (left, right))
    outer, values, turn = np.linalg.svd(small @ inner.T)
    kept = values > negligible * values.max(initial=0)
    root = np.sqrt(values[kept])
    return (
        np.column_stack([base @ (outer[:, kept] * root), left[:, rank:]]),
        np.column_stack([other @ (turn[kept].T * root), right[:, rank:]]),
    )
