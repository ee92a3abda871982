"""Completion of tables against scikit-learn's imputers and plain NumPy Soft-Impute, side by side in one run.

Prints ratios with the errors they were reached at and what a path of λ costs, and draws the two pictures of
docs/choose.md. Times are processor time of one thread on both sides: other work on the machine changes them
little. `python -m benchmarks.completion NAME` runs one part alone (batches, imputers, paths, images, pictures),
`python -m benchmarks.completion large ROWS COLUMNS PER_ROW` one large sparse matrix, with its memory.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from benchmarks import published
from benchmarks.estimators import _peak_memory
from menet.estimators import SoftImpute, complete, cross_validate, nuclear_norm, soft_impute
from menet.estimators.path import FOLD_TOLERANCE

Array = NDArray[Any]
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
FRACTIONS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SIZES = (50, 100, 200, 400)
# A method that took longer at one size is not tried at the next.
PATIENCE = 5.0
# The relative duality gap at which a batch and NumPy are compared.
GAP = 1e-3
CORES = torch.get_num_threads()


def main() -> None:
    """Print the ratios and draw the pictures."""
    print(f"completion: processor time of one thread, torch {torch.__version__}")
    for part in (batches, imputers, paths, images, pictures):
        alone(part)


def alone(part: Callable[[], None]) -> None:
    """Run one part with one thread in torch and in BLAS."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        part()
    torch.set_num_threads(threads)


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


def timed(function: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> tuple[Any, float]:
    """What the function returns, and the processor time it took."""
    start = clock()
    result = function()
    return result, clock() - start


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


def batches(side: int = 200, count: int = 64, compared: int = 2) -> None:
    """A batch of square tables against NumPy one at a time, both to a relative duality gap of 1e-3.

    At the published λ = σ₁/50, which is below the noise, and at one a little above the norm of the noise.
    """
    tables = [table(side, side, 0.6, seed=seed)[0] for seed in range(count)]
    x = torch.from_numpy(np.stack(tables)).float()
    mask = ~x.isnan()
    above = 1.3 * 0.1 * 2 * (0.6 * side) ** 0.5
    for name, shrinkage in (("λ = σ₁/50", None), (f"λ = {above:.1f}", above)):
        estimator = SoftImpute(shrinkage, restore_observed=False, tol=1e-2)
        estimator(x[:1], mask[:1])
        _, ours = timed(lambda estimator=estimator: estimator(x, mask))
        reached = estimator.solve(x, mask)
        theirs, steps, gap = 0.0, 0, 0.0
        for one in tables[:compared]:
            seconds, taken, gap = numpy_to_gap(np.nan_to_num(one), ~np.isnan(one), shrinkage)
            theirs, steps = theirs + seconds, steps + taken
        each, other = ours / count * 1e3, theirs / compared * 1e3
        taken, rank = float(reached.iterations.double().mean()), int(reached.rank.max())
        print(f"  {count} of {side}×{side}, {name}, rank up to {rank}: {other / each:.1f}×")
        print(f"    {each:.1f} ms each, {taken:.1f} iterations, gap {float(reached.gap.max()):.0e}; ", end="")
        print(f"NumPy {other:.0f} ms, {steps / compared:.0f} iterations, gap {gap:.0e}", flush=True)


def numpy_to_gap(filled: Array, mask: Array, shrinkage: float | None) -> tuple[float, int, float]:
    """Plain Soft-Impute as published, until the gap is reached: processor time, iterations and the gap.

    The computation of the gap is not counted.
    """
    x, start = filled.copy(), time.process_time()
    level = np.linalg.svd(filled, compute_uv=False)[0] / 50 if shrinkage is None else shrinkage
    seconds = time.process_time() - start
    step, gap = 0, 1.0
    while gap > GAP:
        step += 1
        start = time.process_time()
        left, values, right = np.linalg.svd(filled, full_matrices=False)
        values = np.maximum(values - level, 0)
        rank = int((values > 0).sum())
        estimate = np.dot(left[:, :rank] * values[:rank], right[:rank])
        filled = np.where(mask, x, estimate)
        seconds += time.process_time() - start
        residual = np.where(mask, x - estimate, 0.0)
        objective = (residual**2).sum() / 2 + level * values.sum()
        residual *= min(1.0, level / np.linalg.norm(residual, 2))
        gap = float(1 - ((residual * x).sum() - (residual**2).sum() / 2) / objective)
    return seconds, step, gap


def imputers(rows: int = 400, columns: int = 50) -> None:
    """Error and time of each method on one low-rank table."""
    x, truth = table(rows, columns, 0.6)
    print(f"  {rows}×{columns} of rank 4, noise 0.1, 40 % missing:")
    for name, method in methods().items():
        # What is compiled or imported at the first call is not counted.
        method(x[:20])
        found, seconds = timed(lambda method=method: method(x))
        print(f"    {name:<18} error {error(found, truth, x):.3f}  {seconds:7.3f} s", flush=True)


def paths(rows: int = 200, columns: int = 100) -> None:
    """20 values of λ and 5 folds against one cold solution at the smallest λ, both in single precision.

    With the default tolerance of each function, and with the tolerance of the folds for both.
    """
    x, _ = table(rows, columns, 0.6)
    tensor = torch.from_numpy(x).float()
    mask = ~tensor.isnan()
    smallest = 1e-2 * float(torch.linalg.matrix_norm(tensor.nan_to_num(), 2))

    def whole(**options: float) -> Any:
        return cross_validate(tensor, mask, generator=torch.Generator().manual_seed(0), **options)

    def fastest(function: Callable[[], Any]) -> float:
        return min(timed(function)[1] for _ in range(4))

    exact = whole(tol=1e-4)
    for name, folds, cold in (
        ("each by default", FOLD_TOLERANCE, 1e-3),
        *((f"tol {t}", t, t) for t in (0.1, 0.01)),
    ):
        one = fastest(lambda cold=cold: soft_impute(tensor, mask, smallest, False, tol=cold)) * 1e3
        all_folds = fastest(lambda folds=folds: whole(tol=folds)) * 1e3
        found = whole(tol=folds)
        off = float((found.errors / exact.errors - 1).abs().max())
        same = "the same" if bool(found.best == exact.best) else "another"
        print(f"  {rows}×{columns}, {name}: cold {one:.1f} ms, 20 λ × 5 folds {all_folds:.0f} ms: ", end="")
        print(f"{all_folds / one:.1f}×; errors within {off:.1%} of exact ones, {same} choice", flush=True)


def images(sides: tuple[int, ...] = (224, 512)) -> None:
    """Photographs as matrices, with gradients, and a table of 1000×300 with 40 % missing.

    At Soft-Impute's λ, and at the published mu = 1, where the rank of a large image is high. Prints the slower of
    two photographs, in processor time of one thread; and the time per image of a batch of both, divided over the
    cores, by the clock.
    """
    from sklearn.datasets import load_sample_images

    photographs = [torch.tensor(image).permute(2, 0, 1) / 127.5 - 1 for image in load_sample_images().images]
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "λ = σ₁/50": lambda x, mask: soft_impute(x, mask, None, False, tol=1e-2),
        "mu = 1": nuclear_norm,
    }

    def both_ways(
        function: Callable[..., torch.Tensor], x: torch.Tensor, mask: torch.Tensor, clock: Callable[[], float]
    ) -> list[float]:
        given = x.clone().requires_grad_()
        estimate, forward = timed(lambda: function(given, mask), clock)
        outgoing = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        return [forward * 1e3, timed(lambda: torch.autograd.grad(estimate, given, outgoing), clock)[1] * 1e3]

    for name, function in functions.items():
        for side in sides:
            x = torch.stack([as_matrix(image, side) for image in photographs])
            for p in (0.3, 0.5, 0.9):
                mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < p
                # What is compiled at the first call is not counted.
                both_ways(function, x[:, :110], mask[:, :110], time.process_time)
                each = [both_ways(function, *pair, time.process_time) for pair in zip(x, mask, strict=True)]
                forward, backward = (max(times) for times in zip(*each, strict=True))
                torch.set_num_threads(CORES)
                batch = [found / len(x) for found in both_ways(function, x, mask, time.perf_counter)]
                torch.set_num_threads(1)
                print(f"  {side}×{side} in color, p = {p}, {name}: forward {forward:.0f} ms, ", end="")
                print(f"backward {backward:.0f} ms; in a batch, {CORES} cores: ", end="")
                print(f"{batch[0]:.0f} and {batch[1]:.0f} ms per image", flush=True)
    x, _ = table(1000, 300, 0.6)
    found, seconds = timed(lambda: complete(x, shrinkage=6.0))
    print(f"  1000×300, 40 % missing, λ = 6: complete {seconds:.2f} s, gap {found.gap:.0e}", end="; ")
    tensor = torch.from_numpy(x).float()
    dense, seconds = timed(lambda: SoftImpute(6.0, tol=1e-2).solve(tensor, ~tensor.isnan()))
    print(f"SoftImpute {seconds:.2f} s with its gap, {float(dense.gap):.0e}", flush=True)


def as_matrix(image: torch.Tensor, side: int) -> torch.Tensor:
    """A photograph `(3, h, w)` as the matrix `(side, 3·side)` of its channels next to each other."""
    length = min(image.shape[1:])
    square = image[None, :, :length, :length]
    scaled = torch.nn.functional.interpolate(square, (side, side), mode="bicubic", antialias=True)[0]
    return scaled.permute(1, 0, 2).reshape(side, 3 * side).contiguous()


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
                # The first run may compile.
                runs = [timed(lambda method=method, x=x: method(x))[1] for _ in range(2)]
                seconds[name].append(min(runs))
    for title, lines, places, labels in (
        ("completion_error", errors, FRACTIONS, ("fraction observed", "relative error on hidden entries")),
        ("completion_time", seconds, SIZES, ("rows (columns: a quarter)", "seconds of processor time")),
    ):
        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        for number, (name, values) in enumerate(lines.items()):
            # The first two nearly coincide in their errors: the first shows around the second.
            size = {"linewidth": 4, "markersize": 10} if number == 0 else {}
            axes.plot(places[: len(values)], values, marker="o", label=name, **size)
        axes.set(xlabel=labels[0], ylabel=labels[1], yscale="log")
        if title == "completion_time":
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(places, [f"{place:g}" for place in places])
        figure.legend(loc="outside right upper", fontsize="small")
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
    elif len(sys.argv) == 2:
        alone({part.__name__: part for part in (batches, imputers, paths, images, pictures)}[sys.argv[1]])
    else:
        main()
