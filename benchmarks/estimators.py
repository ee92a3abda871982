"""The estimators against the published algorithms run as published, side by side in one run on the same images.

The published code works through one image after another; ours takes the batch. Every ratio is of times per image
measured in turns, so that a machine that slows down slows both. After the ratios: how far the results are from
the published ones, then how the cost grows with side, batch and p, and what memory it takes.

The published Soft-Impute stops early, so it is compared twice: with ours at its default tolerance, and at the
loosest one at which no image is farther from the fixed point than the farthest of the published code.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import published
from menet import estimators, images, masks

BATCH = 512
# How many images the published side works through; one at a time takes a while.
PUBLISHED = {"usvt": 64, "soft-impute": 32, "nuclear-norm": 6}
BARS = {"usvt": {0.5: 15, 0.9: 15}, "soft-impute": {0.5: 80, 0.9: 50}, "nuclear-norm": {0.5: 2000, 0.9: 2000}}
LARGER_BAR = 8
TOLERANCES = (0.5, 0.2, 0.1, 0.05, 0.02)
"""Of Soft-Impute, loosest first."""
FEW = 16
"""Images whose fixed point is computed."""
PAUSE = 0.2
ALGORITHMS: dict[str, Callable[..., np.ndarray]] = {
    "usvt": published.usvt,
    "soft-impute": published.soft_impute,
    "nuclear-norm": published.nuclear_norm,
}


def main() -> None:
    """Print ratios, agreement, growth and memory."""
    pictures, what = real_images(BATCH)
    matrices = images.to_matrix(pictures).contiguous()
    print(f"estimators: {BATCH} images of {what}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"  {'method':<14}{'p':>4}{'published':>14}{'ours':>12}{'ratio':>8}   bar")
    for name in ALGORITHMS:
        for p in (0.5, 0.9):
            compare(name, p, matrices)
    larger()
    growth()


def real_images(count: int, side: int = 32) -> tuple[Tensor, str]:
    """CIFAR-10 test images where they are, else crops of the photographs inside scikit-learn."""
    from menet.data import load
    from menet.errors import DataError

    if side == 32:
        try:
            return load("cifar10", split="test").batch(slice(0, count))[0], "CIFAR-10's test set"
        except DataError:
            pass
    from sklearn.datasets import load_sample_images

    photographs = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2).float() / 255
    generator = torch.Generator().manual_seed(0)
    crops = []
    for index in range(count):
        top = int(torch.randint(photographs.shape[2] - side, (1,), generator=generator))
        left = int(torch.randint(photographs.shape[3] - side, (1,), generator=generator))
        crops.append(photographs[index % 2, :, top : top + side, left : left + side])
    return torch.stack(crops), "crops of scikit-learn's photographs"


def compare(name: str, p: float, matrices: Tensor, rounds: int = 5) -> None:
    """A line or two: seconds per image on both sides, their ratio, and how far the results are apart."""
    mask = masks.bernoulli(matrices.shape, p, torch.Generator().manual_seed(1))
    line(name, p, estimators.build(name), matrices, mask, rounds)
    if name == "soft-impute":
        early = distance(None, matrices, mask)
        for tol in TOLERANCES:
            loose = estimators.SoftImpute(tol=tol)
            if distance(loose(matrices[:FEW], mask[:FEW]), matrices, mask) <= early:
                break
        print(f"{'':20}at tol {tol:g}, as accurate as published:")
        line(name, p, loose, matrices, mask, rounds)


def line(
    name: str, p: float, estimator: estimators.Estimator, matrices: Tensor, mask: Tensor, rounds: int
) -> None:
    """One comparison."""
    arrays, seen = matrices.double().numpy(), mask.numpy()
    count = PUBLISHED[name]
    estimator(matrices, mask)
    ALGORITHMS[name](arrays[0], seen[0])
    ours, theirs = [], []
    for part in np.array_split(np.arange(count), rounds):
        # Each side begins after a pause and an untimed call: the other's idle threads still spin for a while.
        time.sleep(PAUSE)
        ALGORITHMS[name](arrays[part[0]], seen[part[0]])
        theirs.append(
            _seconds(lambda part=part: [ALGORITHMS[name](arrays[i], seen[i]) for i in part]) / len(part)
        )
        time.sleep(PAUSE)
        estimate = estimator(matrices, mask)
        ours.append(_seconds(lambda: estimator(matrices, mask)) / len(matrices))
    slow, fast = float(np.median(theirs)), float(np.median(ours))
    bar = BARS[name][p]
    ratio = slow / fast
    verdict = "reached" if ratio >= bar else f"MISSED by {bar / ratio:.2f}×"
    times = f"{slow * 1e3:>11.2f} ms{fast * 1e6:>9.0f} µs{ratio:>7.0f}×"
    print(f"  {name:<14}{p:>4}{times}   {bar}×  {verdict}")
    print(f"{'':20}{agreement(name, estimate, matrices, mask)}", flush=True)


def _seconds(call: Callable[[], object], least: float = 0.1) -> float:
    """Of one call; short ones are repeated, since a core takes a while to wake up."""
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < least:
        call()
        calls += 1
    return spent / calls


def agreement(name: str, estimate: Tensor, matrices: Tensor, mask: Tensor) -> str:
    """How close the results are to the published definition, in the terms the bar is set in."""
    arrays, seen, found = matrices.double().numpy(), mask.numpy(), estimate.double().numpy()
    if name == "usvt":
        apart = max(np.abs(found[i] - published.usvt(arrays[i], seen[i])).max() for i in range(64))
        return f"largest difference of an entry over 64 images: {apart:.1e}"
    if name == "soft-impute":
        apart, early = distance(estimate, matrices, mask), distance(None, matrices, mask)
        return (
            f"largest relative distance from the fixed point over {FEW} images: {apart:.1e} "
            f"(published: {early:.1e})"
        )
    # The optimum itself, from our solver driven to convergence in double precision, and SCS's as a check on it.
    tight = estimators.NuclearNorm(tol=1e-9, max_iter=2000)(matrices.double(), mask).numpy()
    values = [published.nuclear_objective(tight[i], arrays[i], seen[i]) for i in range(len(arrays))]
    ours = [published.nuclear_objective(found[i], arrays[i], seen[i]) for i in range(len(arrays))]
    scs = [
        published.nuclear_objective(published.nuclear_norm(arrays[i], seen[i]), arrays[i], seen[i])
        for i in range(4)
    ]
    over = max(a / b - 1 for a, b in zip(ours, values, strict=True))
    against = max(a / b - 1 for a, b in zip(ours, scs, strict=False))
    return f"objective over the optimum, worst of {len(ours)}: {over:.1e}; over SCS's, worst of 4: {against:.1e}"


def distance(estimate: Tensor | None, matrices: Tensor, mask: Tensor) -> float:
    """The largest relative distance from the fixed point of Soft-Impute over a few images; None: as published."""
    pairs = list(zip(matrices[:FEW].double().numpy(), mask[:FEW].numpy(), strict=True))
    limits = np.stack([published.soft_impute_limit(*pair) for pair in pairs])
    if estimate is None:
        found = np.stack([published.soft_impute(*pair) for pair in pairs])
    else:
        found = estimate[:FEW].double().numpy()
    return float((np.linalg.norm(found - limits, axis=(1, 2)) / np.linalg.norm(limits, axis=(1, 2))).max())


def larger(batch: int = 64) -> None:
    """One line: the cost of an image of 64×64 against one of 32×32, of the same photographs, in turns."""
    estimator = estimators.NuclearNorm()
    calls = {}
    for side in (32, 64):
        matrices = images.to_matrix(real_images(batch, side)[0]).contiguous()
        mask = masks.bernoulli(matrices.shape, 0.5, torch.Generator().manual_seed(0))
        calls[side] = partial(estimator, matrices, mask)
    times: dict[int, list[float]] = {side: [] for side in calls}
    for turn in range(6):
        for side, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[side].append(time.perf_counter() - start)
    ratio = float(np.median(times[64]) / np.median(times[32]))
    verdict = "reached" if ratio <= LARGER_BAR else "MISSED"
    print(f"  nuclear norm, p 0.5: 64×192 takes {ratio:.1f} times 32×96   {LARGER_BAR}×  {verdict}", flush=True)


def growth() -> None:
    """How the cost of nuclear-norm completion grows, and what memory it takes, each in a process of its own."""
    print("  nuclear norm, color, time per image and peak memory beyond the images, of a fresh process each:")
    for label, cases in {
        "side": [(side, 64 if side <= 64 else 4 if side <= 128 else 1, 0.5) for side in (28, 32, 64, 128, 224)],
        "batch": [(32, batch, 0.5) for batch in (1, 8, 64, 256, 1024)],
        "p": [(32, 256, p) for p in (0.1, 0.3, 0.5, 0.7, 0.9)],
    }.items():
        for side, batch, p in cases:
            command = [sys.executable, "-m", "benchmarks.estimators", str(side), str(batch), str(p)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
            print(f"    by {label:<6}side {side:>3}  batch {batch:>4}  p {p:<4} {answer.strip()}", flush=True)


def measure(side: int, batch: int, p: float) -> None:
    """Print one line of `growth`."""
    pictures, _ = real_images(batch, side)
    matrices = images.to_matrix(pictures).contiguous()
    mask = masks.bernoulli(matrices.shape, p, torch.Generator().manual_seed(0))
    estimator = estimators.NuclearNorm()
    estimator(matrices[:1], mask[:1])
    before = _peak_memory(reset=True)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        estimator(matrices, mask)
        best = min(best, time.perf_counter() - start)
    print(f"{best / batch * 1e3:>9.3f} ms  {(_peak_memory() - before) / 1024:>6.1f} MiB")


def _peak_memory(reset: bool = False) -> int:
    """The most memory this process has held since the last reset, in KiB (Linux; elsewhere since its start)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
