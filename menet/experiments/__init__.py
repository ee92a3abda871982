"""Every table and figure of the paper by name: claims, jobs that measure them, and engines that run the jobs.

`EXPERIMENTS` is in the order of the paper, followed by the extensions. Table 8 lists the hyperparameters, which
`menet.training.recipes` has.
"""

from collections.abc import Callable

from menet.errors import ConfigurationError
from menet.experiments import figures
from menet.experiments.plan import Experiment
from menet.experiments.tables import appendix, beyond, cifar10

EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "figure1": figures.figure1,
    "figure2": figures.figure2,
    "figure3": figures.figure3,
    "figure4": figures.figure4,
    "figure5": figures.figure5,
    "figure6": figures.figure6,
    "figure7": figures.figure7,
    "figure8": figures.figure8,
    "figure9": figures.figure9,
    "figure10": figures.figure10,
    "table1": cifar10.table1,
    "table2": cifar10.table2,
    "table3": cifar10.table3,
    "table4": cifar10.table4,
    "table5": cifar10.table5,
    "table6": cifar10.table6,
    "table7": beyond.table7,
    "table9": cifar10.table9,
    "table10": cifar10.table10,
    "table11": cifar10.table11,
    "table12": cifar10.table12,
    "table13": cifar10.table13,
    "table14": appendix.table14,
    "table15": appendix.table15,
    "table16": appendix.table16,
    "table17": appendix.table17,
    "table18": appendix.table18,
    "table19": appendix.table19,
    "table20": appendix.table20,
    "table21": appendix.table21,
    "table22": appendix.table22,
    "table23": cifar10.table23,
    "table24": cifar10.table24,
    "table25": cifar10.table25,
    "table26": beyond.table26,
    "table27": cifar10.table27,
    "certificate": beyond.certificate,
    "tubal-estimator": beyond.tubal_estimator,
    "related-defenses": beyond.related_defenses,
    "cost": beyond.preprocessing_time,
}


def experiment(name: str) -> Experiment:
    """The table or figure of that name, at the paper's scale."""
    if name not in EXPERIMENTS:
        raise ConfigurationError(f"unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]()
