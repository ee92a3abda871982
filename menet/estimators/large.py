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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import ArrayLike
from threadpoolctl import ThreadpoolController

from menet.errors import ConfigurationError
from menet.estimators.base import check_stopping
from menet.estimators.entries import Array, Entries, observed_entries
from menet.estimators.soft_impute import FRACTION_OF_LARGEST
from menet.estimators.solver import ConvergenceWarning

Effects = Literal["none", "rows", "columns", "both"]

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
# Up to the first side, and up to the second where there are at least as many entries as in the Gram matrix, a
# full decomposition of it is faster than Lanczos iterations.
SMALL_SIDE, LARGEST_SIDE = 64, 1500
# Rows and columns are solved in one pass where this many rows come on a column, and the Gram matrices of all
# columns have at most so many entries.
TALL, LARGEST_GRAMS = 4, 500_000


@dataclass(frozen=True)
class Completion:
    """A completed matrix, as factors: the estimate is `left @ right.T` plus effects, clipped to `bounds`.

    `gap` is the duality gap relative to the objective: the objective is at most that much above the minimum. With
    a limit on the rank that binds, it stays above the tolerance. The spectral norm in it is that of Lanczos
    iterations, converged to a tenth of the tolerance.
    """

    left: Array
    right: Array
    row_effects: Array
    column_effects: Array
    shrinkage: float
    objective: float
    gap: float
    sweeps: int
    effects: Effects = "none"
    bounds: tuple[float, float] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), len(self.right)

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @cached_property
    def singular_values(self) -> Array:
        """Of the estimate without effects, in falling order."""
        return _singular_values(self.left, self.right)

    def dense(self) -> Array:
        """The whole estimate; for a large matrix ask for entries by `at` instead."""
        estimate = self.left @ self.right.T + self.row_effects[:, None] + self.column_effects
        return estimate if self.bounds is None else estimate.clip(*self.bounds)

    def at(self, rows: ArrayLike, columns: ArrayLike) -> Array:
        """The estimates of single entries."""
        rows, columns = np.asarray(rows), np.asarray(columns)
        found = np.einsum("ek,ek->e", self.left[rows], self.right[columns])
        found += self.row_effects[rows] + self.column_effects[columns]
        return found if self.bounds is None else found.clip(*self.bounds)

    def project(self, x: Any, mask: Any = None, weights: Any = None) -> "Completion":
        """New rows, given as `complete` takes them, completed by the factor and column effects learned.

        Each is the ridge regression that gives the rows of the completion itself. A row without observed entries
        is zero, plus the column effects.
        """
        entries = observed_entries(x, mask, weights)
        if entries.shape[1] != len(self.right):
            raise ConfigurationError(f"expected rows of {len(self.right)} columns, got {entries.shape[1]}")
        model = _Model(entries, self.shrinkage, self.effects)
        left, right = model.assemble(
            np.zeros((entries.shape[0], self.rank)), self.right, np.zeros(entries.shape[0]), self.column_effects
        )
        model.solve(entries, left, right, model.free_left)
        return replace(self, left=left[:, : self.rank], row_effects=left[:, self.rank].copy(), gap=np.nan)


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


def check_effects(effects: str) -> None:
    """Refuse an unknown kind of effects."""
    if effects not in ("none", "rows", "columns", "both"):
        raise ConfigurationError(f"unknown effects {effects!r}; choose from none, rows, columns, both")


def _turn(found: Completion) -> Completion:
    return replace(
        found,
        left=found.right,
        right=found.left,
        row_effects=found.column_effects,
        column_effects=found.row_effects,
    )


class _Model:
    """The factors with effects beside them: `left` is [U, a, 1] and `right` [V, 1, b], of r + 2 columns."""

    def __init__(self, entries: Entries, shrinkage: float, effects: Effects) -> None:
        self.entries, self.shrinkage = entries, shrinkage
        self.of_rows, self.of_columns = effects in ("rows", "both"), effects in ("columns", "both")

    @staticmethod
    def assemble(left: Array, right: Array, rows: Array, columns: Array) -> tuple[Array, Array]:
        """The two factors in the layout of the compiled loops."""
        return (
            np.column_stack([left, rows, np.ones(len(left))]),
            np.column_stack([right, np.ones(len(right)), columns]),
        )

    def free_left(self, rank: int) -> list[int]:
        return [*range(rank), *([rank] if self.of_rows else [])]

    def free_right(self, rank: int) -> list[int]:
        return [*range(rank), *([rank + 1] if self.of_columns else [])]

    def solve(self, entries: Entries, left: Array, right: Array, free: Callable[[int], list[int]]) -> float:
        """Minimize over the free columns of `left`, in place; the minimum without the penalty on `right`."""
        from menet.kernels.factors import solve_rows

        rank = left.shape[1] - 2
        chosen = np.array(free(rank), dtype=np.int64)
        if not len(chosen):
            return 0.0
        penalty = np.where(chosen < rank, self.shrinkage, 0.0)
        return sum(entries.over_rows(solve_rows, entries.values, entries.weights, left, right, chosen, penalty))


class _Spectrum(NamedTuple):
    """Of the residual: its leading singular triplets outside the factors, a bound on its norm, and uᵀRv of each
    pair of singular vectors of the factors, which is λ at the minimum."""

    left: Array
    values: Array
    right: Array
    norm: float
    along: Array


class _Solver(_Model):
    """The iterations of `complete`."""

    def __init__(self, entries: Entries, effects: Effects, limit: int | None, tol: float, max_iter: int) -> None:
        super().__init__(entries, 1.0, effects)
        self.limit = min(*entries.shape, limit or min(entries.shape))
        self.tol, self.left_over, self.max_iter = tol, max_iter, max_iter
        self.residuals = np.zeros(len(entries.values))
        self.steepest = float(entries.weights.max()) if len(entries.weights) else 1.0
        rows, columns = entries.shape
        weight = float(entries.weights.sum()) if len(entries.weights) else float(len(entries.values))
        # The curvature of the misfit along a pair of singular vectors whose entries are about equal.
        self.curvature = max(weight / (rows * columns), 1e-300)

    @cached_property
    def across(self) -> Entries:
        """The entries by columns."""
        return self.entries.transposed

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
            largest = self.spectrum(*nothing, 1).norm
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
            found = self.spectrum(left, right, min(max(BLOCK, rank // 2), LARGEST_BLOCK))
            lengths = _singular_values(left[:, :rank], right[:, :rank])
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
        from menet.kernels.tall import alternate_rows

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
            _singular_values(left[:, :rank], right[:, :rank]).sum()
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

    def residual(self, left: Array, right: Array) -> float:
        """Store the weighted residuals; half the weighted sum of squares."""
        return self.entries.residuals(left, right, self.residuals)

    def gap(self, objective: float, norm: float) -> float:
        """The relative duality gap; any multiple of the residual of spectral norm at most λ is feasible."""
        entries, residuals = self.entries, self.residuals
        scale = min(1.0, self.shrinkage / norm) if norm > 0 else 1.0
        linear = float(residuals @ entries.values)
        weighted = residuals / entries.weights if len(entries.weights) else residuals
        dual = scale * linear - 0.5 * scale**2 * float(residuals @ weighted)
        return max(0.0, objective - dual) / objective if objective > 0 else 0.0

    def spectrum(self, left: Array, right: Array, count: int) -> _Spectrum:
        """The spectrum of the stored residual, with `count` triplets.

        Inside the factors all singular values of the residual are about λ, which Lanczos iterations could not
        separate. The norm is at most that of the 2×2 matrix of norms of its parts.
        """
        rows, columns = self.entries.shape
        rank = left.shape[1] - 2
        matrix = scipy.sparse.csr_array(
            (self.residuals, self.entries.columns, self.entries.starts), (rows, columns)
        )
        (base, small), (other, inner) = (np.linalg.qr(side[:, :rank]) for side in (left, right))
        image, preimage = matrix @ other, matrix.T @ base
        inside = base.T @ image
        if columns <= SMALL_SIDE or (columns <= LARGEST_SIDE and columns**2 <= len(self.residuals)):
            gram = self.gram() - preimage @ preimage.T
            gram -= other @ (other.T @ gram)
            gram -= (gram @ other) @ other.T
            squares, vectors = np.linalg.eigh((gram + gram.T) / 2)
            vectors, values = vectors[:, ::-1][:, :count], np.sqrt(squares[::-1][:count].clip(min=0))
            vectors -= other @ (other.T @ vectors)
            turned = matrix @ vectors
            turned = (turned - base @ (base.T @ turned)) / np.where(values > 0, values, 1.0)
        else:

            def forward(x: Array) -> Array:
                y = matrix @ (x - other @ (other.T @ x))
                return y - base @ (base.T @ y)

            def backward(y: Array) -> Array:
                x = matrix.T @ (y - base @ (base.T @ y))
                return x - other @ (other.T @ x)

            operator = scipy.sparse.linalg.LinearOperator(
                (rows, columns), matvec=forward, rmatvec=backward, dtype=np.float64
            )
            start = np.random.default_rng(0).standard_normal(columns)
            turned, values, vectors = scipy.sparse.linalg.svds(
                operator, k=min(count, columns - 1), v0=start, tol=min(1e-4, 0.1 * self.tol), maxiter=2_000
            )
            order = np.argsort(values)[::-1]
            turned, values, vectors = turned[:, order], values[order], vectors[order].T
        outside = values.max(initial=0)
        if not rank:
            return _Spectrum(turned, values, vectors, float(outside), np.zeros(0))
        blocks = np.array(
            [
                [np.linalg.norm(inside, 2), np.linalg.norm(preimage - other @ inside.T)],
                [np.linalg.norm(image - base @ inside), outside],
            ]
        )
        # Balanced factors have orthogonal columns, so their bases are their singular vectors up to signs.
        along = np.diag(inside) * np.sign(np.diag(small) * np.diag(inner))
        return _Spectrum(turned, values, vectors, float(np.linalg.norm(blocks, 2)), along)

    def gram(self) -> Array:
        """The residual's Gram matrix of columns."""
        from menet.kernels.tall import gram_rows

        side = self.entries.shape[1]

        def part(*arguments: Any) -> Array:
            gram = np.zeros((side, side))
            gram_rows(*arguments[:-2], gram, *arguments[-2:])
            return gram

        gram: Array = np.sum(self.entries.over_rows(part, self.residuals), axis=0)
        return gram + np.tril(gram, -1).T


def _singular_values(left: Array, right: Array) -> Array:
    """Of `left @ right.T`."""
    if not left.shape[1]:
        return np.zeros(0)
    values: Array = np.linalg.svd(np.linalg.qr(left)[1] @ np.linalg.qr(right)[1].T, compute_uv=False)
    return values


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
