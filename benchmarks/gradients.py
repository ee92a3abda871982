"""What exact gradients cost: forward and backward against forward, and a PGD step against one with BPDA.

Each ratio is of times measured in turns in one process. The loss of an estimator is a fixed random linear
function of its estimate; the PGD steps are those of an attack on the paper's defense, one draw a step.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from menet import MENet, estimators, images, masks, models
from menet.data import Dataset, load

BATCH = 512
BARS = {"nuclear-norm": 2.0, "soft-impute": 2.0, "usvt": 2.0, "tubal": 3.0}
STEP_BARS = {"resnet18": 1.15, "lenet": 1.8}


def main(batch: int = BATCH) -> None:
    """Print the ratios."""
    print(f"gradients: {batch} images, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"  {'data':<9}{'method':<14}{'p':>4}{'forward':>12}{'and backward':>14}{'ratio':>7}   bar")
    for data in ("cifar10", "mnist"):
        pictures = load(data, split="test").batch(slice(0, batch))[0]
        for name in BARS:
            for p in (0.3, 0.5, 0.9):
                compare(data, name, p, pictures)
    for data, network, count in (("cifar10", "resnet18", 32), ("mnist", "lenet", 256)):
        steps(load(data, split="test"), network, count)


def in_turns(calls: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """The median seconds of each call, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def compare(data: str, name: str, p: float, pictures: Tensor) -> None:
    """One line: microseconds per image forward, and forward and backward."""
    matrices = images.to_matrix(pictures, "separate" if name == "tubal" else "joint").contiguous()
    generator = torch.Generator().manual_seed(1)
    mask = masks.bernoulli(matrices.shape, p, generator)
    outgoing = torch.randn(matrices.shape, generator=generator)
    estimator = estimators.build(name)
    leaf = matrices.clone().requires_grad_()
    taken = in_turns(
        {
            "forward": lambda: estimator(matrices, mask),
            "both": lambda: torch.autograd.grad(estimator(leaf, mask), leaf, outgoing),
        }
    )
    forward, both = (taken[part] / len(pictures) * 1e6 for part in ("forward", "both"))
    ratio = both / forward
    verdict = "reached" if ratio <= BARS[name] else "MISSED"
    print(f"  {data:<9}{name:<14}{p:>4}{forward:>9.0f} µs{both:>11.0f} µs{ratio:>7.2f}   {BARS[name]}  {verdict}")


def steps(data: Dataset, network: str, count: int) -> None:
    """One line: a gradient of the defended network with exact gradients and with BPDA."""
    pictures, labels = data.batch(slice(0, count))
    classifier = models.build(network, data).eval()
    calls = {}
    for gradient in ("bpda", "exact"):
        defended = MENet(classifier, p=(0.4, 0.6), gradient=gradient).eval()

        def call(defended: MENet = defended) -> object:
            leaf = pictures.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(defended(leaf), labels)
            return torch.autograd.grad(loss, leaf)

        calls[gradient] = call
    taken = in_turns(calls)
    ratio = taken["exact"] / taken["bpda"]
    verdict = "reached" if ratio <= STEP_BARS[network] else "MISSED"
    print(f"  PGD step on {network} ({data.name}): exact / BPDA {ratio:.2f}   {STEP_BARS[network]}  {verdict}")


if __name__ == "__main__":
    main()
