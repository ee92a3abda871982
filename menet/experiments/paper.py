"""The paper's models and attacks at full scale, as jobs: what tables and figures are composed of."""

from dataclasses import replace
from typing import Any, Literal

from menet.errors import ConfigurationError
from menet.experiments.jobs import Evaluate, Prepare, Train
from menet.training import recipes
from menet.training.recipes import me_net

Method = Literal["vanilla", "madry", "thermometer", "pixel-defend", "total-variation", "me-net"]
Training = Literal["standard", "adversarial"]
Schedule = float | tuple[float, float]

WIDE = "wide-resnet-34-10"
"""The Wide-ResNet of Madry et al.; the paper does not say which it took."""
HIGH, MIDDLE, LOW, LOWEST = (0.8, 1.0), (0.6, 0.8), (0.4, 0.6), (0.2, 0.4)
"""The paper's schedules of p."""
BEYOND = ("exact", "BPDA+EOT", "exact+EOT")
"""Columns that the paper's white-box tables lack: true gradients, expectation over masks, and both."""
EOT = {"eot": 40, "steps": 200}
"""As the third party took that broke the published model: 200 steps of 5ε/200 over about 40 masks."""


def epsilon_of(dataset: str) -> float:
    """The paper's ε, in pixels of [0,1]."""
    return 0.3 if dataset == "mnist" else 8 / 255


def step_of(dataset: str) -> float:
    """The paper's length of a step of PGD."""
    return 0.01 if dataset == "mnist" else 2 / 255


def model(
    dataset: str,
    method: Method = "me-net",
    training: Training = "standard",
    p: Schedule = LOW,
    *,
    masks: int = 10,
    estimator: str = "nuclear-norm",
    network: str | None = None,
    seed: int = 0,
) -> Train:
    """A model of the paper, trained by the recipe of its Appendix B.

    Madry is the bare network under adversarial training. A ME-Net without it learns from prepared estimates
    (Algorithm 1), so that `masks` is the number of estimates of each image; under adversarial training masks are
    drawn afresh.
    """
    config = recipes.by_name(dataset, "paper")
    if network is not None:
        config = replace(config, model=network)
    if method == "madry" or training == "adversarial":
        config = recipes.adversarial(config)
    if method in ("vanilla", "madry"):
        return Train(config=replace(config, seed=seed))
    if method != "me-net":
        return Train(config=replace(config, defense={"name": method}, seed=seed))
    config = replace(config, defense=me_net(estimator, p, masks=masks), seed=seed)
    if training == "adversarial":
        return Train(config=config)
    return Train(config=config, prepared=Prepare(dataset=dataset, defense=config.defense))


def copy_of(victim: Train) -> Train:
    """What a black-box adversary transfers from: the bare network, trained alike, from other random numbers."""
    return Train(config=replace(victim.config, defense={}, seed=victim.config.seed + 1))


def clean(victim: Train) -> Evaluate:
    """A job whose rows hold the answers to clean images; every attack's do, and this is the cheapest."""
    return Evaluate(model=victim, attack="fgsm", settings=_threat(victim), gradient=_bpda(victim))


def white_box(
    victim: Train,
    steps: int,
    *,
    epsilon: float | None = None,
    step_size: float | None = None,
    restarts: int = 1,
) -> Evaluate:
    """PGD on a bare network, BPDA on one behind a preprocessing."""
    settings = {**_threat(victim, epsilon), "steps": steps, "step_size": step_size or _step(victim)}
    if restarts > 1:
        settings["restarts"] = restarts
    return Evaluate(model=victim, attack="pgd", settings=settings, gradient=_bpda(victim))


def beyond(victim: Train, column: str, steps: int = 1000) -> Evaluate:
    """The attack of a column of `BEYOND`: what a defense of random masks must be put to as well."""
    gradient = "exact" if column.startswith("exact") else "bpda"
    settings: dict[str, Any] = {**_threat(victim), "steps": steps, "step_size": _step(victim)}
    if column.endswith("EOT"):
        settings |= {**EOT, "step_size": 5 * settings["epsilon"] / EOT["steps"]}
    return Evaluate(model=victim, attack="pgd", settings=settings, gradient=gradient)


def adaptive(victim: Train, attack: Literal["approximate-input", "projected-bpda"]) -> Evaluate:
    """The paper's two attacks made for ME-Net, 1000 steps."""
    settings = {**_threat(victim), "steps": 1000, "step_size": _step(victim)}
    return Evaluate(model=victim, attack=attack, settings=settings, gradient="bpda")


def black_box(victim: Train, column: str) -> Evaluate:
    """The attack of a column of the black-box tables."""
    if column == "Boundary":
        return Evaluate(model=victim, attack="boundary", settings={**_threat(victim), "steps": 1000})
    if column == "SPSA":
        settings = {**_threat(victim), "steps": 100, "samples": 2048}
        return Evaluate(model=victim, attack="spsa", settings=settings)
    attack, settings = gradient_attack(victim, column)
    return Evaluate(model=victim, attack=attack, settings=settings, source=copy_of(victim))


def gray_box(victim: Train, column: str) -> Evaluate:
    """The attack of a column of the tables whose adversary has the network but does not see the preprocessing."""
    attack, settings = gradient_attack(victim, column)
    return Evaluate(model=victim, attack=attack, settings=settings, gray=True)


def after_preprocessing(victim: Train, column: str) -> Evaluate:
    """The attack of a column of the table whose adversary attacks only what comes after the preprocessing."""
    attack, settings = gradient_attack(victim, column)
    if attack == "fgsm":
        settings |= {"steps": 1, "step_size": settings["epsilon"], "random_start": False}
    return Evaluate(model=victim, attack="after-preprocessing", settings=settings)


def gradient_attack(victim: Train, column: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of the attack that a column is headed by: FGSM, PGD 7, CW κ=20, CW (κ = 50)."""
    word, _, rest = column.partition(" ")
    settings = _threat(victim)
    if word == "FGSM":
        return "fgsm", settings
    settings["step_size"] = _step(victim)
    if word == "PGD":
        return "pgd", {**settings, "steps": int(rest)}
    if word == "CW":
        return "cw", {**settings, "steps": 40, "kappa": int(rest.partition("=")[2] or 50)}
    raise ConfigurationError(f"column is {column!r}; accepted are FGSM, PGD STEPS, CW and CW κ=CONFIDENCE")


def _threat(victim: Train, epsilon: float | None = None) -> dict[str, Any]:
    return {"epsilon": epsilon_of(victim.config.dataset) if epsilon is None else epsilon}


def _step(victim: Train) -> float:
    return step_of(victim.config.dataset)


def _bpda(victim: Train) -> str | None:
    return "bpda" if victim.config.defense else None
