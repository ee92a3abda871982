"""The figures: each a function that returns it at the paper's scale."""

from dataclasses import replace

from menet.experiments.jobs import Train, format_schedule
from menet.experiments.measures import FeatureVectors, Ranks, Reconstructions, Redistributed
from menet.experiments.plan import NAMES, Cell, Figure, Form, Panel, Point
from menet.experiments.tables import (
    HIGH,
    LOW,
    LOWEST,
    MIDDLE,
    Schedule,
    black_box,
    clean,
    model,
    white_box,
    white_box_steps,
)
from menet.experiments.tables.paper import MOST_ROBUST
from menet.training.recipes import me_net

FEATURE_EXAMPLES = 2000
"""Images behind figures 4 and 5."""


def figure1() -> Figure:
    """Histogram and CDF of the approximate rank of images, four datasets."""
    panels = tuple(Panel(name, sources=((name, Ranks(dataset=dataset)),)) for dataset, name in NAMES.items())
    return Figure("figure1", "Approximate rank of images", "ranks", panels, "approximate rank", "dataset cdf")


def figure2() -> Figure:
    """Images masked with several p and reconstructed."""
    return _reconstructions("figure2", "Images under matrix estimation", "visual me", (0.3, 0.5, 0.7, 0.9))


def figure3() -> Figure:
    """The diagram of training and inference, with an image of Tiny-ImageNet on its way."""
    job = Reconstructions(
        dataset="tiny-imagenet",
        defense={**me_net("nuclear-norm", LOW), "masks": 1},
        probabilities=(LOW[0], sum(LOW) / 2, LOW[1]),
        examples=1,
    )
    panel = Panel("", sources=(("images", job),))
    return Figure("figure3", "ME-Net's training and inference", "diagram", (panel,), "", "menet")


def figure4() -> Figure:
    """t-SNE of penultimate-layer features under a transfer attack."""
    return _features("figure4", "Features under a transfer attack, t-SNE", "plane", "tsne")


def figure5() -> Figure:
    """Distances of features within and between classes under a transfer attack."""
    return _features("figure5", "Distances within and between classes", "distances", "intra inter distance")


def figure6() -> Figure:
    """White-box accuracy by number of steps, four datasets."""
    panels = []
    for dataset in ("cifar10", "mnist", "svhn", "tiny-imagenet"):
        p = MOST_ROBUST[dataset]
        victims = (
            ("Madry", model(dataset, "madry")),
            ("ME-Net", model(dataset, p=p)),
            ("ME-Net, adversarial", model(dataset, "me-net", "adversarial", p)),
        )
        curves = tuple((name, _by_steps(name, victim, white_box_steps(dataset))) for name, victim in victims)
        panels.append(Panel(NAMES[dataset], curves))
    return Figure("figure6", "White-box accuracy by steps", "lines", tuple(panels), "steps", "white box")


def figure7() -> Figure:
    """White-box accuracy of ME-Net without adversarial training for ε = 2, 4 and 8, CIFAR-10."""
    schedules: tuple[Schedule, ...] = (HIGH, (0.7, 0.9), MIDDLE, (0.5, 0.7), LOW)
    panels = []
    for pixels in (2, 4, 8):
        curves = tuple(
            (
                format_schedule(p),
                _by_steps(format_schedule(p), model("cifar10", p=p), (7, 20, 40, 100), pixels / 255),
            )
            for p in schedules
        )
        panels.append(Panel(f"ε = {pixels}/255", curves))
    title = "CIFAR-10, white-box, ME-Net without adversarial training"
    return Figure("figure7", title, "lines", tuple(panels), "steps", "appendix cifar white pure")


def figure8() -> Figure:
    """Clean and robust accuracy by p, four datasets."""
    panels = []
    for dataset, name in NAMES.items():
        clean_points, attacked_points = [], []
        for p in (LOWEST, LOW, MIDDLE, HIGH):
            victim, middle = model(dataset, p=p), sum(p) / 2
            clean_points.append(Point(middle, Cell("clean", f"{middle:g}", clean(victim), clean=True)))
            attacked_points.append(Point(middle, Cell("attacked", f"{middle:g}", white_box(victim, 7))))
        curves = (("clean", tuple(clean_points)), ("BPDA, 7 steps", tuple(attacked_points)))
        panels.append(Panel(name, curves))
    title = "Clean and robust accuracy by p"
    return Figure("figure8", title, "lines", tuple(panels), "middle of the schedule of p", "appendix tradeoff")


def figure9() -> Figure:
    """Figure 2 for more values of p (appendix)."""
    probabilities = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    title = "Images estimated from a fraction p of their entries"
    return _reconstructions("figure9", title, "appendix visual mc", probabilities)


def figure10() -> Figure:
    """Images, adversarial examples of the vanilla network and their differences, before and after estimation."""
    attacked = replace(white_box(model("tiny-imagenet", "vanilla"), 40), examples=100, snapshots=4)
    job = Redistributed(attacked=attacked, defended=model("tiny-imagenet", p=LOW))
    panel = Panel("", sources=(("images", job),))
    title = "Adversarial perturbations before and after matrix estimation"
    return Figure("figure10", title, "pictures", (panel,), "", "appendix timgnet")


def _by_steps(
    name: str, victim: Train, steps: tuple[int, ...], epsilon: float | None = None
) -> tuple[Point, ...]:
    return tuple(
        Point(count, Cell(name, str(count), white_box(victim, count, epsilon=epsilon))) for count in steps
    )


def _reconstructions(name: str, title: str, label: str, probabilities: tuple[float, ...]) -> Figure:
    defense = {**me_net(), "masks": 1}
    job = Reconstructions(dataset="tiny-imagenet", defense=defense, probabilities=probabilities)
    return Figure(name, title, "reconstructions", (Panel("", sources=(("images", job),)),), "p", label)


def _features(name: str, title: str, form: Form, label: str) -> Figure:
    panels = []
    for method, victim in (("Vanilla", model("cifar10", "vanilla")), ("ME-Net", model("cifar10", p=HIGH))):
        attacked = replace(black_box(victim, "PGD 40"), examples=FEATURE_EXAMPLES, snapshots=FEATURE_EXAMPLES)
        panels.append(Panel(method, sources=((method, FeatureVectors(attacked=attacked)),)))
    return Figure(name, title, form, tuple(panels), "distance", label)
