"""Figures 4 and 5: how classes stay apart before the last layer, under a transferred attack."""

from dataclasses import replace

from menet.experiments.measures import Vectors
from menet.experiments.paper import HIGH, black_box, model
from menet.experiments.plan import Figure, Form, Panel

EXAMPLES = 2000


def plan() -> Figure:
    """t-SNE of the vectors."""
    return _figure("figure4", "Classes under a black-box attack, by t-SNE", "plane", "tsne")


def plan_of_distances() -> Figure:
    """The distribution of distances within and among classes."""
    return _figure("figure5", "Distances within and among classes", "distances", "intra inter distance")


def _figure(name: str, title: str, form: Form, label: str) -> Figure:
    panels = []
    for method, victim in (("Vanilla", model("cifar10", "vanilla")), ("ME-Net", model("cifar10", p=HIGH))):
        attacked = replace(black_box(victim, "PGD 40"), examples=EXAMPLES, pictures=EXAMPLES)
        panels.append(Panel(method, sources=((method, Vectors(attacked=attacked)),)))
    return Figure(name, title, form, tuple(panels), "distance", label)
