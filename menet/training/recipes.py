"""Recipes: functions that return a `TrainingConfig`. Change one with `dataclasses.replace`.

Those named `paper_…` are Appendix B of the paper. The `cores_…` are robust training within 2.5 hours on two cores
(MNIST: one hour), with the same time for every objective, so that their results compare with each other. Those
for certificates are networks of experts, in minutes of one core. The rest are short recipes of minutes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from menet.errors import ConfigurationError
from menet.training.config import Objective, TrainingConfig, me_net

Kind = Literal["short", "cores", "paper", "certificate"]

__all__ = [
    "RECIPES",
    "Kind",
    "adversarial",
    "at_equal_time",
    "by_name",
    "cores",
    "digits",
    "me_net",
    "with_defense",
]

LINF_8: dict[str, Any] = {"norm": "linf", "epsilon": 8 / 255, "steps": 7, "step_size": 2 / 255}
"""The paper's training attack on all datasets but MNIST."""
LINF_MNIST: dict[str, Any] = {"norm": "linf", "epsilon": 0.3, "steps": 40, "step_size": 0.01}
"""The paper's training attack on MNIST, after Madry et al."""
LINF_MNIST_SHORT: dict[str, Any] = {**LINF_MNIST, "steps": 10, "step_size": 0.075}
HELD_OUT = 0.1
"""Fraction of a folder's training images that is held out for validation."""
STEPS, SMALLEST_BATCH = 25, 8
"""Least number of steps in an epoch on a folder of images, and the smallest batch that this may lead to."""
PAPER: dict[str, Any] = {
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "batch_size": 256,
    "schedule": "step",
    "precision": "float32",
}


def paper_cifar10() -> TrainingConfig:
    """ResNet-18 on CIFAR-10, 200 epochs (Appendix B). For the Wide-ResNet change `model`."""
    return TrainingConfig(
        recipe="paper", dataset="cifar10", model="resnet18", epochs=200, learning_rate=0.1, milestones=(100, 150),
        augmentation=True, **PAPER, **LINF_8,
    )  # fmt: skip


def paper_mnist() -> TrainingConfig:
    """LeNet on MNIST, 200 epochs, no augmentation (Appendix B)."""
    return TrainingConfig(
        recipe="paper", dataset="mnist", model="lenet", epochs=200, learning_rate=0.01, milestones=(100, 150),
        **PAPER, **LINF_MNIST,
    )  # fmt: skip


def paper_svhn() -> TrainingConfig:
    """ResNet-18 on SVHN, 200 epochs (Appendix B)."""
    return TrainingConfig(
        recipe="paper", dataset="svhn", model="resnet18", epochs=200, learning_rate=0.01, milestones=(100, 150),
        augmentation=True, **PAPER, **LINF_8,
    )  # fmt: skip


def paper_tiny_imagenet() -> TrainingConfig:
    """DenseNet-121 on Tiny-ImageNet, 90 epochs (Appendix B)."""
    return TrainingConfig(
        recipe="paper", dataset="tiny-imagenet", model="densenet121", epochs=90, learning_rate=0.1,
        milestones=(30, 60), augmentation=True, **PAPER, **LINF_8,
    )  # fmt: skip


def digits() -> TrainingConfig:
    """LeNet on the 4,000 embedded digits: seconds with standard training, minutes with adversarial."""
    return TrainingConfig(
        recipe="short", dataset="digits", model="lenet", epochs=8, batch_size=50, learning_rate=0.05,
        weight_decay=5e-4, validation=400, **LINF_MNIST_SHORT,
    )  # fmt: skip


def mnist() -> TrainingConfig:
    """LeNet on MNIST, four epochs of one cycle; the training attack takes 10 larger steps in place of 40."""
    return TrainingConfig(
        recipe="short", dataset="mnist", model="lenet", epochs=4, batch_size=100, learning_rate=0.05,
        weight_decay=5e-4, validation=1000, **LINF_MNIST_SHORT,
    )  # fmt: skip


def cifar10() -> TrainingConfig:
    """The small network on CIFAR-10, twelve epochs of one cycle."""
    return TrainingConfig(
        recipe="short", dataset="cifar10", model="small", epochs=12, batch_size=128, learning_rate=0.2,
        weight_decay=5e-4, augmentation=True, validation=1000, **LINF_8,
    )  # fmt: skip


def svhn() -> TrainingConfig:
    """The small network on SVHN, twelve epochs of one cycle.

    A flipped digit is none, so there is no augmentation. The budget rises for most of the training: with all of
    it from the start, or after a third, adversarial training stays at chance.
    """
    return replace(cifar10(), dataset="svhn", learning_rate=0.1, epsilon_warm_up=0.8, augmentation=False)


def tiny_imagenet() -> TrainingConfig:
    """The small network on Tiny-ImageNet, twenty epochs of one cycle."""
    return replace(cifar10(), dataset="tiny-imagenet", epochs=20, learning_rate=0.1, validation=250)


def cores_mnist() -> TrainingConfig:
    """LeNet on MNIST within one hour on two cores. Its budget rises first: at once, ε 0.3 stalls at chance."""
    return TrainingConfig(
        recipe="cores", dataset="mnist", model="lenet", epochs=34, batch_size=128, optimizer="adamw",
        learning_rate=2e-3, weight_decay=1e-3, epsilon_warm_up=0.3, clip_gradient=1.0, ema=0.999,
        validation=1000, **{**LINF_MNIST_SHORT, "steps": 7, "step_size": 0.1},
    )  # fmt: skip


def cores_cifar10() -> TrainingConfig:
    """The compact network on CIFAR-10 within 2.5 hours on two cores."""
    return TrainingConfig(
        recipe="cores", dataset="cifar10", model="compact", epochs=25, batch_size=128, learning_rate=0.2,
        weight_decay=5e-4, label_smoothing=0.1, clip_gradient=1.0, ema=0.999, augmentation=True, validation=1000,
        **LINF_8,
    )  # fmt: skip


def cores_svhn() -> TrainingConfig:
    """The compact network on SVHN, all 73,257 images; a part of them takes more epochs for CIFAR-10's time."""
    return replace(
        cores_cifar10(), dataset="svhn", epochs=18, learning_rate=0.1, epsilon_warm_up=0.2, augmentation=False
    )


def cores_tiny_imagenet() -> TrainingConfig:
    """The compact network, with a stem of stride 2, on Tiny-ImageNet, all 100,000 images."""
    return replace(cores_cifar10(), dataset="tiny-imagenet", epochs=13, learning_rate=0.1)


def certificate_mnist() -> TrainingConfig:
    """Experts for the cells of three lattices, each of 64 cells; ten minutes of one core.

    Networks behind masks are trained at a learning rate of 0.002.
    """
    return TrainingConfig(
        recipe="certificate", dataset="mnist", model="experts-3x64", epochs=20, batch_size=256, optimizer="adamw",
        learning_rate=1e-2, weight_decay=1e-2, clip_gradient=1.0, ema=0.999, **LINF_MNIST_SHORT,
    )  # fmt: skip


def certificate_cifar10() -> TrainingConfig:
    """The same experts for color images."""
    return replace(certificate_mnist(), dataset="cifar10", **LINF_8)


RECIPES: dict[tuple[str, str], Callable[[], TrainingConfig]] = {
    ("digits", "short"): digits,
    ("mnist", "short"): mnist,
    ("cifar10", "short"): cifar10,
    ("svhn", "short"): svhn,
    ("tiny-imagenet", "short"): tiny_imagenet,
    ("mnist", "cores"): cores_mnist,
    ("cifar10", "cores"): cores_cifar10,
    ("svhn", "cores"): cores_svhn,
    ("tiny-imagenet", "cores"): cores_tiny_imagenet,
    ("mnist", "certificate"): certificate_mnist,
    ("cifar10", "certificate"): certificate_cifar10,
    ("mnist", "paper"): paper_mnist,
    ("cifar10", "paper"): paper_cifar10,
    ("svhn", "paper"): paper_svhn,
    ("tiny-imagenet", "paper"): paper_tiny_imagenet,
}


def by_name(dataset: str, kind: Kind = "short", images: int | None = None) -> TrainingConfig:
    """The recipe for a dataset; a folder of images gets Tiny-ImageNet's, fitted to its number of `images`."""
    folder = dataset.partition(":")[0] == "folder"
    name = "tiny-imagenet" if folder else dataset
    if (name, kind) not in RECIPES:
        known = ", ".join(f"{kind} for {name}" for name, kind in RECIPES)
        raise ConfigurationError(f"unknown recipe {kind!r} for dataset {dataset!r}; choose from {known}")
    recipe = replace(RECIPES[name, kind](), dataset=dataset)
    return sized(recipe, images) if folder else recipe


def sized(config: TrainingConfig, images: int | None = None) -> TrainingConfig:
    """A recipe for a training set of `images`, however small; None for one that is large.

    A tenth of the images are held out where the recipe holds out any. Batches are halved until an epoch has some
    25 steps, and the learning rate with them (Goyal et al. 2017).
    """
    if config.validation:
        config = replace(config, validation=HELD_OUT)
    if images is None:
        return config
    left, batch_size = images - config.held_out(images), config.batch_size
    while batch_size > SMALLEST_BATCH and left < STEPS * batch_size:
        batch_size //= 2
    batch_size = max(1, min(batch_size, left))
    return replace(
        config, batch_size=batch_size, learning_rate=config.learning_rate * batch_size / config.batch_size
    )


def cores(
    dataset: str, objective: Objective = "standard", defense: dict[str, Any] | None = None, eot: int = 1
) -> TrainingConfig:
    """The recipe of scale `cores` for one of the rows of a comparison: an objective, with a defense or none.

    `eot` draws of the defense are averaged in each gradient of the training attack.

    Vanilla is `cores(name)`, adversarial `cores(name, "n-fgsm")`, ME-Net pure `cores(name, defense=me_net())`,
    ME-Net adversarial `cores(name, "n-fgsm", me_net())`. All take about the same time, except that standard
    training ends where it gains no more.
    """
    recipe = replace(by_name(dataset, "cores"), objective=objective, defense=defense or {}, eot=eot)
    return at_equal_time(recipe)


def passes(config: TrainingConfig) -> int:
    """What a training step costs per image, in forward passes: a backward pass counts as one for the gradient of
    the images or of the weights, as two for both. For a LeNet an estimate counts as one; other networks cost so
    much more that it does not count."""
    estimate = 1 if config.defense and config.model == "lenet" else 0
    gradient = (2 + estimate) * config.eot
    return {
        "standard": 3 + estimate,
        "n-fgsm": gradient + 3 + estimate,
        "adversarial": config.steps * gradient + 3 + estimate,
        "trades": config.steps * gradient + 7 + 2 * estimate,
    }[config.objective]


ENOUGH = {"mnist": 6}
"""Epochs after which standard training gains no more: longer would be equal time for its own sake."""


def at_equal_time(config: TrainingConfig) -> TrainingConfig:
    """A recipe of scale `cores`, whose epochs are those of standard training without a defense, with the epochs
    that take its objective and its defense as long; other recipes as they are."""
    if config.recipe != "cores":
        return config
    standard = passes(replace(config, objective="standard", defense={}))
    epochs = max(1, round(config.epochs * standard / passes(config)))
    if config.objective == "standard":
        epochs = min(epochs, ENOUGH.get(config.dataset, epochs))
    return replace(config, epochs=epochs)


def with_defense(config: TrainingConfig, defense: dict[str, Any] | None = None) -> TrainingConfig:
    """The recipe with a defense; by default ME-Net with nuclear norm, p 0.4→0.6."""
    return replace(config, defense=me_net() if defense is None else defense)


def adversarial(config: TrainingConfig) -> TrainingConfig:
    """The recipe with adversarial training against its training attack."""
    return replace(config, objective="adversarial")
