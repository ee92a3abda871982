"""Every experiment there is, by name, in the order of the paper; then ours."""

from collections.abc import Callable

from menet.errors import ConfigurationError
from menet.experiments.figures import (
    epsilons,
    pictures,
    ranks,
    reconstruction,
    separation,
    trade_off,
    white_box_steps,
)
from menet.experiments.plan import Plan
from menet.experiments.tables import (
    adaptive,
    certificate,
    cifar_after_preprocessing,
    cifar_black,
    cifar_black_compare,
    cifar_black_ours,
    cifar_gray,
    cifar_white_adversarial,
    cifar_white_compare,
    cifar_white_pure,
    cifar_white_sota,
    cost,
    estimators,
    estimators_black,
    estimators_white,
    generalisation,
    mnist_black,
    mnist_gray,
    mnist_white,
    number_of_masks,
    restarts,
    svhn_black,
    svhn_gray,
    svhn_white,
    tensor_estimator,
    tiny_imagenet_black,
    tiny_imagenet_gray,
    tiny_imagenet_white,
    voting,
)

EXPERIMENTS: dict[str, Callable[[], Plan]] = {
    "figure1": ranks.plan,
    "figure2": reconstruction.plan,
    "figure4": separation.plan,
    "figure5": separation.plan_of_distances,
    "figure6": white_box_steps.plan,
    "figure7": epsilons.plan,
    "figure8": trade_off.plan,
    "figure9": reconstruction.plan_of_probabilities,
    "figure10": pictures.plan,
    "table1": cifar_black_compare.plan,
    "table2": cifar_black_ours.plan,
    "table3": cifar_white_compare.plan,
    "table4": cifar_white_sota.plan,
    "table5": adaptive.plan,
    "table6": estimators.plan,
    "table7": generalisation.plan,
    "table9": cifar_black.plan,
    "table10": cifar_gray.plan,
    "table11": cifar_white_pure.plan,
    "table12": cifar_after_preprocessing.plan,
    "table13": cifar_white_adversarial.plan,
    "table14": mnist_black.plan,
    "table15": mnist_gray.plan,
    "table16": mnist_white.plan,
    "table17": svhn_black.plan,
    "table18": svhn_gray.plan,
    "table19": svhn_white.plan,
    "table20": tiny_imagenet_black.plan,
    "table21": tiny_imagenet_gray.plan,
    "table22": tiny_imagenet_white.plan,
    "table23": estimators_black.plan,
    "table24": estimators_white.plan,
    "table25": restarts.plan,
    "table26": voting.plan,
    "table27": number_of_masks.plan,
    "certificate": certificate.plan,
    "tensor-estimator": tensor_estimator.plan,
    "cost": cost.plan,
}
"""Figure 3 is a diagram; table 8 holds the hyper-parameters, which `menet.training.recipes` has."""


def plan_of(name: str) -> Plan:
    """The plan of an experiment, at the scale of the paper."""
    if name not in EXPERIMENTS:
        raise ConfigurationError(f"there is no experiment {name!r}; accepted are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]()
