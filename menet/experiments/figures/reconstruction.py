"""Figures 2 and 9: images under masks of several p, and what the estimator makes of them."""

from menet.experiments.measures import Reconstructions
from menet.experiments.plan import Figure, Panel
from menet.training.recipes import me_net


def plan() -> Figure:
    return _figure("figure2", "What matrix estimation does to images", "visual me", (0.3, 0.5, 0.7, 0.9))


def plan_of_probabilities() -> Figure:
    """The appendix's figure, over more values of p."""
    probabilities = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    return _figure(
        "figure9", "Images estimated from a share p of their entries", "appendix visual mc", probabilities
    )


def _figure(name: str, title: str, label: str, probabilities: tuple[float, ...]) -> Figure:
    defense = {**me_net(), "masks": 1}
    job = Reconstructions(dataset="tiny-imagenet", defense=defense, probabilities=probabilities)
    return Figure(name, title, "reconstructions", (Panel("", sources=(("images", job),)),), "p", label)
