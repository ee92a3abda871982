"""What training costs, measured side by side in one run; with `--shapes`, which compact network learns most.

1. The defense's fraction of an adversarial step (ResNet-18, PGD of 7 steps, fresh masks at each). Bars: nuclear
   norm ≤ 10 % (aim 5 %), USVT ≤ 2 %.
2. The speed of a training step as a fraction of the machine's matrix products. Bar: the compact network reaches
   half of what ResNet-18 reaches.
3. Pure ME-Net training over vanilla training, per image, with batches made ahead as in a run. Bars: 1.15 with
   the compact network, 1.05 with ResNet-18.
4. What an objective costs over standard training, and whether `torch.compile` helps.

`python -m benchmarks.training --shapes MINUTES` trains networks of several shapes on CIFAR-10 by N-FGSM for the
same processor time each, in turn, and compares their robust accuracy. It needs the dataset.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from menet import data, models
from menet.attacks import PGD, ThreatModel
from menet.attacks.losses import MARGIN
from menet.distributed import Worker
from menet.errors import DataError
from menet.evaluation.accuracy import clopper_pearson
from menet.models import initialize
from menet.models.networks import (
    Architecture,
    BasicBlock,
    Body,
    Compact,
    ConvolutionUnit,
    Network,
    average,
)
from menet.preprocessed import Preprocessed, rebuild
from menet.training.batches import Batches, crop_and_flip, estimated_ahead
from menet.training.config import (
    TrainingConfig,
    autocast,
    averaged_copy,
    build_optimizer,
    me_net,
    number_type,
    update_average,
)
from menet.training.loop import Step
from menet.training.objectives import build_objective
from menet.training.recipes import cores_cifar10, paper_cifar10

BARS = {"nuclear-norm": 0.10, "usvt": 0.02}
P = {"nuclear-norm": (0.4, 0.6), "usvt": (0.8, 1.0)}
OVERHEAD = {"compact": 1.15, "resnet18": 1.05}
SIDE = 1536
"""Of the matrices whose product is the machine's peak."""


def main(repeats: int = 3, batch: int = 32, model: str = "resnet18", steps: int = 7) -> None:
    """Print every measurement beside its bar."""
    images, labels = _photographs(batch)
    print(f"training: {model}, adversarial step of PGD-{steps}, batches of {batch}")
    works = {name: _Watched(_config(name, model, steps, batch), images, labels) for name in BARS}
    bare = _Watched(_config(None, model, steps, batch), images, labels)
    _in_turn([bare, *works.values()], repeats)
    for name, work in works.items():
        fraction = median(inside / whole for inside, whole in zip(work.inside, work.whole, strict=True))
        missed = "" if fraction <= BARS[name] else "  MISSED"
        print(f"  {name + ', fraction of the step':<40} {fraction:6.1%} (bar {BARS[name]:.0%}){missed}")
        print(f"  {name + ', step / undefended step':<40} {median(work.whole) / median(bare.whole):5.2f} ×")
    _throughput(repeats)
    _overhead(repeats)
    _objectives(repeats)


def _throughput(repeats: int) -> None:
    """Training steps of both networks against matrix products, in turn."""
    print("training: speed of a standard step as a fraction of the speed of matrix products")
    images, labels = _photographs(128)
    config = replace(cores_cifar10(), label_smoothing=0.0, clip_gradient=None)
    kind = number_type("auto", images.device)
    a, b = torch.rand(2, SIDE, SIDE).to(kind)
    works = {name: _Watched(replace(config, model=name), images, labels) for name in OVERHEAD}
    products: list[float] = []
    _in_turn(list(works.values()), repeats, lambda: products.append(_seconds(lambda: a @ b)))
    peak = 2 * SIDE**3 / median(products)
    reached = {}
    for name, work in works.items():
        # A backward pass through images and weights takes twice the operations of a forward pass.
        rate = 3 * operations(models.build(name)) * len(images) / median(work.whole)
        reached[name] = rate / peak
        speed = len(images) / median(work.whole)
        print(f"  {name:<40} {reached[name]:6.1%} of {peak / 1e9:.0f} GFLOP/s, {speed:.0f} images/s")
    ratio = reached["compact"] / reached["resnet18"]
    print(f"  {'compact / resnet18':<40} {ratio:5.2f} × (bar 0.50){'' if ratio >= 0.5 else '  MISSED'}")


def _overhead(repeats: int, steps: int = 24) -> None:
    """Pure ME-Net over vanilla, in epochs of a few steps with batches made ahead as in a run."""
    print("training: pure ME-Net (nuclear norm) / vanilla, per image")
    for model, bar in OVERHEAD.items():
        size = 128 if model == "compact" else 32
        for dataset in _datasets(size * steps):
            config = replace(cores_cifar10(), model=model, batch_size=size, validation=0)
            runs = [_Epochs(config, dataset), _Epochs(replace(config, defense=me_net()), dataset)]
            for turn in range(repeats + 1):
                for run in runs:
                    run.epoch(keep=turn > 0)
            ratio = median(runs[1].whole) / median(runs[0].whole)
            missed = "" if ratio <= bar else "  MISSED"
            print(f"  {f'{model}, {dataset.name}':<40} {ratio:5.2f} × (bar {bar}){missed}")


def _datasets(count: int) -> Iterator[data.Dataset]:
    """CIFAR-10, if it is installed, and photographs with sharper edges, on which the estimators take longer."""
    try:
        installed = data.load("cifar10", "train")
        yield installed.at(torch.arange(count))
    except DataError as error:
        print(f"  without CIFAR-10: {error}")
    pixels, labels = _photographs(count)
    classes, mean, deviation = tuple("0123456789"), (0.0,) * 3, (1.0,) * 3
    yield data.Dataset(
        "photographs", "train", pixels.mul(255).byte().contiguous(), labels, classes, mean, deviation
    )


def _objectives(repeats: int) -> None:
    """Objectives over standard training, and `torch.compile` over none."""
    print("training: compact, a step / a standard step")
    images, labels = _photographs(128)
    config = cores_cifar10()
    works = {
        name: _Watched(replace(config, objective=name), images, labels)
        for name in ("standard", "n-fgsm", "adversarial")
    }
    compiled = _Watched(config, images, labels, compiled=True)
    works["standard, torch.compile"] = compiled
    _in_turn(list(works.values()), repeats)
    for name, work in list(works.items())[1:]:
        print(f"  {name:<40} {median(work.whole) / median(works['standard'].whole):5.2f} ×")


def _config(estimator: str | None, model: str, steps: int, batch: int) -> TrainingConfig:
    defense = {} if estimator is None else me_net(estimator, P[estimator])
    recipe = replace(
        paper_cifar10(), objective="adversarial", precision="auto", model=model, steps=steps, batch_size=batch
    )
    return replace(recipe, defense=defense)


class _Watched:
    """A training step with a clock around the defense's own work."""

    def __init__(self, config: TrainingConfig, images: Tensor, labels: Tensor, *, compiled: bool = False) -> None:
        network = models.build(config.model, generator=torch.Generator().manual_seed(0))
        network = network.to(memory_format=torch.channels_last)
        self.model: nn.Module = rebuild(network, config.defense).train()
        if isinstance(self.model, Preprocessed):
            self._watch(self.model)
        kind = number_type(config.precision, images.device)
        forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.module = Step(forward, build_objective(config, Worker()), torch.Generator(), kind)
        self.optimizer = build_optimizer(config, self.model)
        self.images, self.labels = images, labels
        self.inside: list[float] = []
        self.whole: list[float] = []
        self._spent = 0.0

    def _watch(self, model: Preprocessed) -> None:
        original = model.preprocess

        def watched(*arguments: Any, **options: Any) -> Tensor:
            started = time.perf_counter()
            estimates = original(*arguments, **options)
            self._spent += time.perf_counter() - started
            return estimates

        model.preprocess = watched  # type: ignore[method-assign]

    def step(self, *, keep: bool) -> None:
        self._spent, started = 0.0, time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = self.module(self.images, self.labels)
        loss.backward()
        self.optimizer.step()
        if keep:
            self.whole.append(time.perf_counter() - started)
            self.inside.append(self._spent)


class _Epochs:
    """Epochs of standard training as the loop runs them: batches made ahead, a step on each."""

    def __init__(self, config: TrainingConfig, dataset: data.Dataset) -> None:
        self.batches = Batches(config, dataset, torch.arange(len(dataset)), torch.arange(0), None)
        network = models.build(config.model, dataset, generator=torch.Generator().manual_seed(0))
        self.model = rebuild(network.to(memory_format=torch.channels_last), config.defense).train()  # type: ignore[call-overload]
        self.defense = estimated_ahead(config, self.model)
        objective = build_objective(config, Worker(), estimated=self.defense is not None)
        kind = number_type(config.precision, torch.device("cpu"))
        self.step = Step(self.model, objective, torch.Generator(), kind)
        self.optimizer = build_optimizer(config, self.model)
        self.generators = {"augmentation": torch.Generator()}
        if self.defense is not None:
            self.generators["model"] = self.defense.generator
        self.whole: list[float] = []

    def epoch(self, *, keep: bool) -> None:
        started = time.perf_counter()
        with self.batches.ahead(0, 0, self.generators, Worker(), self.defense) as ready:
            for images, labels in ready:
                self.optimizer.zero_grad(set_to_none=True)
                self.step(images, labels).loss.backward()
                self.optimizer.step()
        if keep:
            self.whole.append(time.perf_counter() - started)


def _in_turn(works: Sequence[_Watched], repeats: int, between: Callable[[], None] | None = None) -> None:
    # In turn, so that whatever else the machine does falls on all of them alike.
    for turn in range(repeats + 1):
        for work in works:
            work.step(keep=turn > 0)
            if between is not None:
                between()


def _seconds(function: Callable[[], object], times: int = 3) -> float:
    started = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - started) / times


def operations(network: nn.Module, side: int = 32) -> int:
    """Multiplications and additions of the convolutions and the head in a forward pass of one image."""
    total = 0

    def count(layer: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal total
        positions = output[0, 0].numel() if output.ndim == 4 else 1
        total += 2 * layer.weight.numel() * positions  # type: ignore[operator, union-attr]

    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad(), _evaluating(network):
        network(torch.rand(1, 3, side, side))
    for handle in handles:
        handle.remove()
    return total


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    was_training = network.training
    network.eval()
    yield
    network.train(was_training)


def _photographs(count: int) -> tuple[Tensor, Tensor]:
    # Real images: on noise the estimators would need more iterations than they ever do.
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.tensor(picture).permute(2, 0, 1) for picture in load_sample_images().images]
    crops = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        top = int(torch.randint(picture.shape[1] - 64, (), generator=generator))
        left = int(torch.randint(picture.shape[2] - 64, (), generator=generator))
        crops.append(picture[:, top : top + 64 : 2, left : left + 64 : 2])
    images = torch.stack(crops).float().div(255).to(memory_format=torch.channels_last)
    return images, torch.randint(10, (count,), generator=generator)


class _Strided(Body):
    """A strided stem and three stages of basic blocks, each of half the resolution and twice the width."""

    def __init__(self, channels: int, widths: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 4, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        layers, inputs = [], widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(blocks):
                layers.append(BasicBlock(inputs, outputs, 2 if stage > 0 and block == 0 else 1))
                inputs = outputs
        self.blocks, self.width = nn.Sequential(*layers), inputs

    def forward(self, images: Tensor) -> Tensor:
        return average(self.blocks(torch.relu(self.stem_norm(self.stem(images)))))


class _ResNet9(Body):
    """The form of DAWNBench's ResNet-9: full resolution first, pooling between stages, two residual pairs."""

    def __init__(self, channels: int, widths: Sequence[int] = (32, 64, 128, 256)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.layers = nn.Sequential(
            ConvolutionUnit(channels, first),
            ConvolutionUnit(first, second, pool=True),
            BasicBlock(second, second, 1),
            ConvolutionUnit(second, third, pool=True),
            ConvolutionUnit(third, last, pool=True),
            BasicBlock(last, last, 1),
        )
        self.width = last

    def forward(self, images: Tensor) -> Tensor:
        return average(self.layers(images))


SHAPES: dict[str, Callable[[], Body]] = {
    "strided stem, 96-192-384, 1 block": lambda: _Strided(3, (96, 192, 384), 1),
    "strided stem, 64-128-256, 1 block": lambda: _Strided(3, (64, 128, 256), 1),
    "strided stem, 64-128-256, 2 blocks": lambda: _Strided(3, (64, 128, 256), 2),
    "compact (airbench)": lambda: Compact(3),
    "ResNet-9": lambda: _ResNet9(3),
}


def compare_shapes(minutes: float, chosen: Sequence[str] = (), images: int = 1000) -> None:
    """Train each shape by N-FGSM for `minutes` of processor time on one thread; print its accuracies.

    The shapes take turns, the one that has had the least time next: whatever else the machine does slows all of
    them alike. Averaged weights are tested, under PGD of 10 steps, on the same images, so that differences from
    the first shape come with an interval of their own.
    """
    torch.set_num_threads(1)
    train_set, test_set = data.load("cifar10", "train"), data.load("cifar10", "test")
    config = replace(cores_cifar10(), objective="n-fgsm", ema=0.99)
    precision = number_type(config.precision, torch.device("cpu"))
    attack = PGD(threat=ThreatModel("linf", 8 / 255), steps=10, step_size=2 / 255, loss=MARGIN, keep="last")
    print(f"shapes: N-FGSM on CIFAR-10, {minutes:g} minutes of one core each, {precision}, {images} test images")
    runs = {name: _ShapeRun(name, config, train_set, 60 * minutes, precision) for name in chosen or SHAPES}
    while (run := min(runs.values(), key=lambda run: run.spent)).spent < run.seconds:
        run.step()
    reference: Tensor | None = None
    for name, run in runs.items():
        clean, robust = (_correct(run.averaged, test_set, images, a, precision) for a in (None, attack))
        reference = robust if reference is None else reference
        gain = robust - reference
        spread = 1.96 * gain.std().item() / math.sqrt(images)
        print(
            f"  {name:<36} {operations(run.network) / 1e9:.2f} GFLOP, {run.epochs:5.2f} epochs, "
            f"clean {_percent(clean)}, PGD {_percent(robust)}, {100 * gain.mean():+.1f} ± {100 * spread:.1f}",
            flush=True,
        )


def _percent(correct: Tensor) -> str:
    interval = clopper_pearson(int(correct.sum()), len(correct))
    return f"{100 * correct.mean():.1f} % ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})"


def _correct(
    model: nn.Module, dataset: data.Dataset, images: int, attack: PGD | None, precision: torch.dtype
) -> Tensor:
    """Whether each of the first `images` is classified correctly, under attack."""
    model.eval()
    parts = []
    for index in torch.arange(images).split(250):
        x, y = dataset.batch(index)
        with autocast(precision, torch.device("cpu")):
            if attack is not None:
                x = attack(model, x, y, generator=torch.Generator().manual_seed(0)).images
            with torch.no_grad():
                parts.append((model(x).argmax(1) == y).float())
    return torch.cat(parts)


class _ShapeRun:
    """A training that ends after `seconds` of processor time; the learning rate follows one cycle over them."""

    def __init__(
        self, name: str, config: TrainingConfig, dataset: data.Dataset, seconds: float, precision: torch.dtype
    ) -> None:
        network = Network(Architecture(name, 3, 32, 10, dataset.mean, dataset.std), SHAPES[name]())
        initialize(network, torch.Generator().manual_seed(0))
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.config, self.dataset, self.seconds = config, dataset, seconds
        self.work = Step(self.network.train(), build_objective(config, Worker()), torch.Generator(), precision)
        self.optimizer = build_optimizer(config, self.network)
        averaged = averaged_copy(config, self.network)
        assert averaged is not None
        self.averaged = averaged
        self.generator = torch.Generator().manual_seed(1)
        self.order = torch.empty(0, dtype=torch.int64)
        self.spent, self.number = 0.0, 0

    @property
    def epochs(self) -> float:
        return self.number * self.config.batch_size / len(self.dataset)

    def step(self) -> None:
        started, config = time.process_time(), self.config
        done = self.spent / self.seconds
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(done / 0.3 + 0.02, (1 - done) / 0.7, 1.0)
        if len(self.order) < config.batch_size:
            self.order = torch.randperm(len(self.dataset), generator=self.generator)
        index, self.order = self.order[: config.batch_size], self.order[config.batch_size :]
        images, labels = self.dataset.batch(index, lambda pixels: crop_and_flip(pixels, generator=self.generator))
        self.optimizer.zero_grad(set_to_none=True)
        self.work(images.contiguous(memory_format=torch.channels_last), labels).loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), config.clip_gradient or math.inf)
        self.optimizer.step()
        self.number += 1
        update_average(self.averaged, self.network, config.ema, self.number)
        self.spent += time.process_time() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=float, metavar="MINUTES", help="compare shapes for so long each")
    parser.add_argument("--only", nargs="*", default=(), choices=tuple(SHAPES), help="of these shapes")
    options = parser.parse_args()
    if options.shapes:
        compare_shapes(options.shapes, options.only)
    else:
        main()
