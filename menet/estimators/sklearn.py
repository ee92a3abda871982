"""Imputers for scikit-learn: NaN is missing, columns are centered and scaled, new rows use what was learned.

They need the extra `sklearn`. Observed values stay as they are unless `restore_observed=False`, which returns the
estimate for them too. A column without any observed value is filled with zero.
"""

from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from menet.errors import ConfigurationError, require
from menet.estimators.base import FRACTION_OF_LARGEST, Effects
from menet.estimators.entries import Completion
from menet.estimators.large import GAP, complete
from menet.estimators.path import cross_validate, cross_validate_large
from menet.estimators.soft_impute import soft_impute
from menet.estimators.splitting import constrained
from menet.estimators.usvt import USVT

require("sklearn", "sklearn")

from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

Array = NDArray[Any]

DENSE_SIDE = 256
"""Up to this shorter side λ is chosen on dense batches: all folds at once, however high the rank."""
DENSE_ENTRIES = 1_000_000
"""Up to this size such a table is then solved by the dense solver first."""
HELD_OUT = 0.1
"""The fraction of observed entries that `score` hides."""


class _Imputer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """What the imputers share; `_learn` and `_estimate` work on centered and scaled columns."""

    center: bool
    scale: bool
    restore_observed: bool
    bounds: tuple[float, float] | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from a table of shape (samples, features) with NaN at missing entries."""
        X = self._checked(X, reset=True)
        seen = ~np.isnan(X)
        counts = np.maximum(seen.sum(0), 1)
        # Each column in units of its largest entry: squares of very large or small ones stay representable.
        unit = np.abs(np.where(seen, X, 0)).max(0, initial=0)
        unit = np.where(unit > 0, unit, 1.0)
        filled = np.where(seen, X, 0) / unit
        mean = filled.sum(0) / counts
        self.mean_ = mean * unit if self.center else np.zeros(X.shape[1])
        deviation = np.sqrt((np.where(seen, filled - mean, 0) ** 2).sum(0) / counts)
        # The rounding error of a constant column is no scale.
        spread = np.where(deviation > 1e-12, deviation, 1.0) * unit
        self.scale_ = spread if self.scale else np.ones(X.shape[1])
        self._learn((X - self.mean_) / self.scale_)
        return self

    def transform(self, X: Any) -> Array:
        """The table with its missing entries estimated, in its own units."""
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        return self._returned(X, self._estimate((X - self.mean_) / self.scale_))

    def score(self, X: Any, y: Any = None) -> float:
        """Minus the mean square error, in units of each column's variance, on a tenth of the entries, hidden.

        What `GridSearchCV` maximizes; always the same entries, so that scores compare.
        """
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        hidden = ~np.isnan(X) & (np.random.default_rng(0).random(X.shape) < HELD_OUT)
        if not hidden.any():
            raise ConfigurationError("expected enough observed entries to hide some for a score, got too few")
        scaled = (X - self.mean_) / self.scale_
        estimate = self._estimate(np.where(hidden, np.nan, scaled))
        return -float(np.mean((estimate - scaled)[hidden] ** 2))

    def _checked(self, X: Any, reset: bool) -> Array:
        checked: Array = validate_data(
            self, X, reset=reset, dtype=[np.float64, np.float32], ensure_all_finite=False
        )
        if np.isinf(checked).any():
            raise ConfigurationError("expected finite values or NaN, got infinity; mark missing entries by NaN")
        return checked

    def _returned(self, X: Array, estimate: Array) -> Array:
        estimate = (estimate * self.scale_ + self.mean_).astype(X.dtype)
        if self.bounds is not None:
            estimate = estimate.clip(*self.bounds)
        return np.where(np.isnan(X), estimate, X) if self.restore_observed else estimate

    def _learn(self, scaled: Array) -> None:
        raise NotImplementedError

    def _estimate(self, scaled: Array) -> Array:
        raise NotImplementedError


class SoftImputer(_Imputer):
    """Soft-Impute by factors:  min ½‖observed∘(X − x)‖² + λ‖X‖_*, at any size.

    `shrinkage` is λ for the scaled table: a number, None for 1/50 of the smallest λ with X = 0, or "cv" for the
    best of 20 by 5 folds of held-out entries (`random_state` seeds them). `rank` limits the rank. `effects` adds
    unpenalized effects of rows, columns or both. `bounds` (low, high), in the table's units, clip the estimates.
    New rows are ridge regressions on the factors learned, as the rows of the table itself are.
    """

    completion_: Completion

    def __init__(
        self,
        shrinkage: float | Literal["cv"] | None = None,
        *,
        rank: int | None = None,
        effects: Effects = "none",
        bounds: tuple[float, float] | None = None,
        center: bool = True,
        scale: bool = True,
        restore_observed: bool = True,
        tol: float = GAP,
        max_iter: int = 500,
        random_state: int = 0,
    ) -> None:
        self.shrinkage, self.rank, self.effects, self.bounds = shrinkage, rank, effects, bounds
        self.center, self.scale, self.restore_observed = center, scale, restore_observed
        self.tol, self.max_iter, self.random_state = tol, max_iter, random_state

    def _learn(self, scaled: Array) -> None:
        level = self.shrinkage
        options: dict[str, Any] = {"effects": self.effects, "rank": self.rank, "max_iter": self.max_iter}
        dense = self.effects == "none" and self.rank is None and min(scaled.shape) <= DENSE_SIDE
        if level == "cv":
            generator = torch.Generator().manual_seed(self.random_state)
            if dense:
                tensor = torch.from_numpy(scaled)
                self.cross_validation_ = cross_validate(tensor, ~tensor.isnan(), generator=generator)
            else:
                self.cross_validation_ = cross_validate_large(scaled, generator=generator, **options)
            level = float(self.cross_validation_.best)
        elif isinstance(level, str):
            raise ConfigurationError(f"expected shrinkage to be a number, None or 'cv', got {level!r}")
        start = None
        if dense and scaled.size <= DENSE_ENTRIES and (level is None or level > 0):
            start = _dense_completion(scaled, level)
            level = level if start is None else start.shrinkage
        self.completion_ = complete(scaled, shrinkage=level, tol=self.tol, start=start, **options)
        self.shrinkage_, self.rank_ = self.completion_.shrinkage, self.completion_.rank
        self.n_iter_ = max(1, self.completion_.sweeps)

    def _estimate(self, scaled: Array) -> Array:
        return self.completion_.project(scaled).dense()


def _dense_completion(scaled: Array, level: float | None) -> Completion | None:
    """The completion of a small table by the dense solver, which takes a tenth of the time at a high rank."""
    x = torch.from_numpy(np.ascontiguousarray(scaled, dtype=np.float64))
    mask = ~x.isnan()
    largest = float(torch.linalg.matrix_norm(x.nan_to_num(), 2))
    level = FRACTION_OF_LARGEST * largest if level is None else level
    if not level < largest:
        return None
    estimate = soft_impute(x, mask, level, False).numpy()
    # At the minimum, rows and columns without an entry are zero; the solver comes close.
    estimate[~mask.numpy().any(1)] = 0
    estimate[:, ~mask.numpy().any(0)] = 0
    left, values, right = np.linalg.svd(estimate, full_matrices=False)
    rank = int((values > 1e-9 * values[0]).sum())
    root = np.sqrt(values[:rank])
    return Completion(
        left=np.ascontiguousarray(left[:, :rank] * root),
        right=np.ascontiguousarray(right[:rank].T * root),
        row_effects=np.zeros(x.shape[0]),
        column_effects=np.zeros(x.shape[1]),
        shrinkage=level,
        objective=np.nan,
        gap=np.nan,
        sweeps=0,
    )


class NuclearNormImputer(SoftImputer):
    """Nuclear-norm minimization:  min mu·‖X‖_* + ‖observed∘(X − x)‖², which is `SoftImputer` with λ = mu/2.

    `mu` is a number, None or "cv", for the scaled table. With `bounds` the estimate of the table itself is the
    minimum within them, by `constrained`, for tables that fit into memory; new rows are clipped.
    """

    def __init__(
        self,
        mu: float | Literal["cv"] | None = None,
        *,
        rank: int | None = None,
        effects: Effects = "none",
        bounds: tuple[float, float] | None = None,
        center: bool = True,
        scale: bool = True,
        restore_observed: bool = True,
        tol: float = GAP,
        max_iter: int = 500,
        random_state: int = 0,
    ) -> None:
        self.mu = mu
        self.rank, self.effects, self.bounds = rank, effects, bounds
        self.center, self.scale, self.restore_observed = center, scale, restore_observed
        self.tol, self.max_iter, self.random_state = tol, max_iter, random_state

    @property
    def shrinkage(self) -> float | Literal["cv"] | None:  # type: ignore[override]
        return self.mu / 2 if isinstance(self.mu, (int, float)) else self.mu

    def fit_transform(self, X: Any, y: Any = None, **options: Any) -> Any:
        """Fit, and return the table completed; with `bounds` by the minimum within them."""
        self.fit(X, y)
        if self.bounds is None:
            return self.transform(X)
        checked = self._checked(X, reset=False)
        # One scale for the whole table: bounds in its units are then the same number for every entry.
        unit = float(np.mean(self.scale_))
        tensor = torch.from_numpy(checked.astype(np.float64) / unit)
        low, high = self.bounds
        # Centering is an effect of the columns.
        effects: Effects = "both" if self.effects in ("rows", "both") else "columns"
        found = constrained(
            tensor,
            ~tensor.isnan(),
            self.shrinkage_,
            bounds=(low / unit, high / unit),
            effects=effects if self.center else self.effects,
            tol=self.tol,
            max_iter=10 * self.max_iter,
        )
        estimate = (found.estimate.numpy() * unit).clip(low, high).astype(checked.dtype)
        return np.where(np.isnan(checked), estimate, checked) if self.restore_observed else estimate


class USVTImputer(_Imputer):
    """Universal singular value thresholding: the leading right singular vectors of the zero-filled, scaled table.

    `keep` is the fraction of them, or "universal" for Chatterjee's threshold (`menet.usvt`). A row, new or not,
    is projected on them and divided by the observed fraction of the table that was learned from.
    """

    def __init__(
        self,
        keep: float | Literal["universal"] = "universal",
        *,
        eta: float = 0.01,
        center: bool = True,
        scale: bool = True,
        restore_observed: bool = True,
    ) -> None:
        self.keep, self.eta = keep, eta
        self.center, self.scale, self.restore_observed = center, scale, restore_observed

    def _learn(self, scaled: Array) -> None:
        USVT(self.keep, self.eta)
        seen = ~np.isnan(scaled)
        self.fraction_ = float(seen.mean()) or 1.0
        _, values, vectors = np.linalg.svd(np.where(seen, scaled, 0.0), full_matrices=False)
        if self.keep == "universal":
            count = int((values >= (2 + self.eta) * np.sqrt(max(scaled.shape) * self.fraction_)).sum())
        else:
            count = max(1, int(self.keep * len(values)))
        self.components_ = vectors[:count]

    def _estimate(self, scaled: Array) -> Array:
        return np.where(np.isnan(scaled), 0.0, scaled) @ self.components_.T @ self.components_ / self.fraction_
