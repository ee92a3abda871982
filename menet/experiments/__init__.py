"""Every table and figure of the paper by name: claims, jobs that measure them, and engines that run the jobs.

`EXPERIMENTS` is in the order of the paper, followed by the extensions. Table 8 lists the hyperparameters, which
`menet.training.recipes` has.
"""

from collections.abc import Callable

from menet.errors import ConfigurationError
from menet.experiments import figures
from menet.experiments.plan import Experiment
from menet.experiments.tables import beyond, paper

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
    "table1": paper.table1,
    "table2": paper.table2,
    "table3": paper.table3,
    "table4": paper.table4,
    "table5": paper.table5,
    "table6": paper.table6,
    "table7": paper.table7,
    "table9": paper.table9,
    "table10": paper.table10,
    "table11": paper.table11,
    "table12": paper.table12,
    "table13": paper.table13,
    "table14": paper.table14,
    "table15": paper.table15,
    "table16": paper.table16,
    "table17": paper.table17,
    "table18": paper.table18,
    "table19": paper.table19,
    "table20": paper.table20,
    "table21": paper.table21,
    "table22": paper.table22,
    "table23": paper.table23,
    "table24": paper.table24,
    "table25": paper.table25,
    "table26": paper.table26,
    "table27": paper.table27,
    "certificate": beyond.certificate,
    "estimation": beyond.estimation,
    "estimators": beyond.estimators,
    "published-code": beyond.published_code,
    "related-defenses": beyond.related_defenses,
    "cost": beyond.preprocessing_time,
}


def experiment(name: str) -> Experiment:
    """The table or figure of that name, at the paper's scale."""
    if name not in EXPERIMENTS:
        raise ConfigurationError(f"unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]()
