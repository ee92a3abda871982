"""Figure 1: histogram and distribution of the approximate rank of four datasets' images."""

from menet.experiments.measures import Ranks
from menet.experiments.plan import NAMES, Figure, Panel


def plan() -> Figure:
    panels = tuple(Panel(name, sources=((name, Ranks(dataset=dataset)),)) for dataset, name in NAMES.items())
    return Figure("figure1", "The approximate rank of images", "ranks", panels, "approximate rank", "dataset cdf")
