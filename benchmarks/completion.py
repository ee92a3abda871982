"""Completion of tables against scikit-learn's imputers and plain NumPy Soft-Impute, side by side in one run.

Prints ratios with the errors they were reached at and what a path of λ costs, and draws the two pictures of
docs/choose.md. `python -m benchmarks.completion large ROWS COLUMNS PER_ROW` measures time and memory of one large
sparse matrix in a process of its own.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import published
from benchmarks.estimators import _peak_memory
from menet.estimators import complete, cross_validate, soft_impute

Array = NDArray[Any]
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
FRACTIONS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SIZES = (50, 100, 200, 400)
# A method that took longer at one size is not tried at the next.
PATIENCE = 5.0


def main() -> None:
    """Print the ratios and draw the pictures."""
    print(f"completion: {torch.get_num_threads()} threads, torch {torch.__version__}")
    batches()
    imputers()
    paths()
    pictures()


def table(
    rows: int, columns: int, p: float, rank: int = 4, noise: float = 0.1, seed: int = 0
) -> tuple[Array, Array]:
    """A noisy table of low rank and unit variance with NaN at missing entries, and the truth."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal((rows, rank)) @ random.standard_normal((rank, columns)) / rank**0.5
    noisy = truth + noise * random.standard_normal(truth.shape)
    return np.where(random.random(truth.shape) < p, noisy, np.nan), truth


def error(found: Array, truth: Array, x: Array) -> float:
    """Root mean square on missing entries, relative to that of the truth."""
    missing = np.isnan(x)
    return float(np.sqrt(np.mean((found - truth)[missing] ** 2) / np.mean(truth[missing] ** 2)))


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def methods() -> dict[str, Callable[[Array], Array]]:
    """What people use, by name: a table with NaN to a table without."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    from menet.estimators.sklearn import SoftImputer, USVTImputer

    return {
        "SoftImputer(cv)": lambda x: SoftImputer("cv").fit_transform(x),
        "SoftImputer": lambda x: SoftImputer().fit_transform(x),
        "USVTImputer": lambda x: USVTImputer().fit_transform(x),
        "NumPy Soft-Impute": lambda x: published.soft_impute(np.nan_to_num(x), ~np.isnan(x)),
        "IterativeImputer": lambda x: IterativeImputer(keep_empty_features=True).fit_transform(x),
        "KNNImputer": lambda x: KNNImputer(keep_empty_features=True).fit_transform(x),
        "mean": lambda x: SimpleImputer(keep_empty_features=True).fit_transform(x),
    }


def batches(side: int = 200, count: int = 64, alone: int = 2) -> None:
    """A batch of square matrices against NumPy one at a time, both at λ = σ₁/50."""
    pairs = [table(side, side, 0.6, seed=seed) for seed in range(count)]
    x = torch.from_numpy(np.stack([pair[0] for pair in pairs])).float()
    mask = ~x.isnan()
    soft_impute(x[:2], mask[:2])
    _, ours = timed(lambda: soft_impute(x, mask))
    arrays = [np.nan_to_num(pair[0]) for pair in pairs[:alone]]
    _, theirs = timed(lambda: [published.soft_impute(a, m.numpy()) for a, m in zip(arrays, mask, strict=False)])
    ratio = theirs / alone / (ours / count)
    each = f"{ours / count * 1e3:.1f} ms each, NumPy {theirs / alone * 1e3:.0f} ms"
    print(f"  {count} of {side}×{side}: {each}: {ratio:.0f}×", flush=True)


def imputers(rows: int = 400, columns: int = 50) -> None:
    """Error and time of each method on one low-rank table."""
    x, truth = table(rows, columns, 0.6)
    print(f"  {rows}×{columns} of rank 4, noise 0.1, 40 % missing:")
    for name, method in methods().items():
        method(x[:20])
        found, seconds = timed(lambda method=method: method(x))
        print(f"    {name:<18} error {error(found, truth, x):.3f}  {seconds:7.3f} s", flush=True)


def paths(rows: int = 200, columns: int = 100) -> None:
    """20 values of λ and 5 folds against one cold solution at the smallest λ."""
    x, _ = table(rows, columns, 0.6)
    tensor = torch.from_numpy(x)
    mask = ~tensor.isnan()
    smallest = 1e-2 * float(torch.linalg.matrix_norm(tensor.nan_to_num(), 2))
    _, cold = timed(lambda: soft_impute(tensor, mask, smallest, False, tol=1e-2))
    generator = torch.Generator().manual_seed(0)
    _, whole = timed(lambda: cross_validate(tensor, mask, generator=generator))
    print(
        f"  {rows}×{columns}: one cold solution {cold:.2f} s; 20 λ × 5 folds {whole:.2f} s: {whole / cold:.1f}×"
    )


def pictures() -> None:
    """Draw error against the fraction observed and time against size."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "menet"
    FIGURES.mkdir(exist_ok=True)
    errors: dict[str, list[float]] = {name: [] for name in methods()}
    for p in FRACTIONS:
        x, truth = table(200, 50, p)
        for name, method in methods().items():
            errors[name].append(error(method(x), truth, x))
    seconds: dict[str, list[float]] = {name: [] for name in methods()}
    for size in SIZES:
        x, _ = table(size, size // 4, 0.6)
        for name, method in methods().items():
            if len(seconds[name]) == SIZES.index(size) and max(seconds[name], default=0) < PATIENCE:
                seconds[name].append(timed(lambda method=method, x=x: method(x))[1])
    for title, lines, places, labels in (
        ("completion_error", errors, FRACTIONS, ("fraction observed", "relative error on hidden entries")),
        ("completion_time", seconds, SIZES, ("rows (columns: a quarter)", "seconds")),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, values in lines.items():
            axes.plot(places[: len(values)], values, marker="o", label=name)
        axes.set(xlabel=labels[0], ylabel=labels[1], yscale="log")
        if title == "completion_time":
            axes.set_xscale("log")
        axes.legend(fontsize="small")
        figure.savefig(FIGURES / f"{title}.svg", metadata={"Date": None})
        pyplot.close(figure)
        print(f"  {title}: " + "; ".join(f"{n} " + " ".join(f"{v:.3g}" for v in vs) for n, vs in lines.items()))


def large(rows: int, columns: int, per_row: int, rank: int = 5, noise: float = 0.3) -> None:
    """Complete one sparse matrix with `per_row` observed entries in each row; print time, gap, error, memory."""
    import scipy.sparse

    random = np.random.default_rng(0)
    left, right = (random.standard_normal((side, rank)) / rank**0.25 for side in (rows, columns))
    # One entry in each of `per_row` stretches of columns: no duplicates, and sorted.
    stretch = columns // per_row
    places = (np.arange(per_row) * stretch + random.integers(stretch, size=(rows, per_row))).astype(np.int32)
    values = np.empty((rows, per_row), np.float32)
    for k in range(per_row):
        values[:, k] = np.einsum("ik,ik->i", left, right[places[:, k]]) + noise * random.standard_normal(rows)
    starts = np.arange(0, rows * per_row + 1, per_row)
    x = scipy.sparse.csr_array((values.ravel(), places.ravel(), starts), shape=(rows, columns))
    # A little above the spectral norm of the noise.
    level = 1.3 * noise * (per_row**0.5 + (rows * per_row / columns) ** 0.5)
    complete(x[:50], shrinkage=level)
    before = _peak_memory(reset=True)
    used = time.process_time()
    found, seconds = timed(lambda: complete(x, shrinkage=level))
    used = time.process_time() - used
    memory = (_peak_memory() - before) / 1024
    i, j = random.integers(rows, size=100_000), random.integers(columns, size=100_000)
    truth = np.einsum("ek,ek->e", left[i], right[j])
    wrong = np.sqrt(np.mean((found.at(i, j) - truth) ** 2) / np.mean(truth**2))
    cost = f"{seconds:.1f} s ({used:.1f} s of processor), {memory:.0f} MiB more"
    reached = f"rank {found.rank}, gap {found.gap:.1e}, {found.sweeps} sweeps, relative error {wrong:.3f}"
    print(f"{rows}×{columns}, {per_row} per row: {cost}, {reached}")


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "large":
        large(*(int(word) for word in sys.argv[2:]))
    else:
        main()
