"""The tables, by dataset: each a function that returns it at the paper's scale.

Here: the paper's models and attacks as jobs, and the rows that tables and figures are composed of. The budget ε
and the step size are those of the paper's training recipes (`menet.training.recipes`), which every attack on a
model takes from its configuration. Rows and columns are named as in `claims.json`, by which each cell finds the
paper's number.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from menet.errors import ConfigurationError
from menet.experiments.jobs import Evaluate, Prepare, Train, format_schedule
from menet.experiments.plan import NAMES, Cell, Table
from menet.training import recipes
from menet.training.recipes import me_net

Method = Literal[
    "vanilla",
    "madry",
    "thermometer",
    "pixel-defend",
    "total-variation",
    "image-quilting",
    "defense-gan",
    "me-net",
]
Training = Literal["standard", "adversarial"]
Schedule = float | tuple[float, float]

WIDE = "wide-resnet-34-10"
"""The Wide-ResNet of Madry et al.; the paper does not say which one it used."""
HIGH, MIDDLE, LOW, LOWEST = (0.8, 1.0), (0.6, 0.8), (0.4, 0.6), (0.2, 0.4)
"""The paper's schedules of p."""
SUITE = "standard"
EXTENSIONS = ("exact", "BPDA+EOT", "exact+EOT", SUITE)
"""Columns that the paper's white-box tables lack: exact gradients, expectation over transformation, both, and the
standard suite."""
BOUNDED, DEFENDED = "Boundary within ε", " from a defended surrogate"
"""Columns that the paper's black-box tables lack; the second is the end of a name."""
EOT = {"eot": 40, "steps": 200}
"""The setting of the third party that broke the published model: 200 steps of 5ε/200 over about 40 draws."""
BASELINES: dict[str, dict[str, Any]] = {
    "pixel-defend": {"likelihood": "pixel-cnn++", "width": 160, "layers": 5, "mixtures": 10, "steps": 400_000},
    "image-quilting": {"patches": 1_000_000},
    "defense-gan": {
        "steps": 200,
        "starts": 10,
        "method": "gradient-descent",
        "unrolled": 10,
        "latent": 128,
        "features": 64,
        "gan_steps": 200_000,
    },
}
"""Settings of the baselines that differ from their defaults, as published: the network of PixelDefend, which is
trained until its held-out likelihood stops improving, for at most so many steps; the bank of image quilting; and
the generator of Defense-GAN, of whose projection exact gradients pass the last steps."""
TRAININGS: tuple[tuple[str, Training], ...] = (("Prep.", "standard"), ("Prep. + Adv. train", "adversarial"))
STEPS = (7, 20, 40, 100, 1000)
"""Steps of the white-box attacks."""


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
    bank: bool = False,
) -> Train:
    """A model of the paper, trained by the recipe of its Appendix B.

    Madry is the undefended network under adversarial training. A ME-Net without adversarial training learns from
    prepared estimates (Algorithm 1): `masks` estimates of each image, all of them in every epoch. Under
    adversarial training masks are drawn afresh, or with `bank` from `masks` fixed ones of each image. Total
    variation has the p of ME-Net ("the same setting used with ME-Net").
    """
    config = recipes.by_name(dataset, "paper")
    if network is not None:
        config = replace(config, model=network)
    if method == "madry" or training == "adversarial":
        config = recipes.adversarial(config)
    if method in ("vanilla", "madry"):
        return Train(config=replace(config, seed=seed))
    if method != "me-net":
        defense: dict[str, Any] = {"name": method, **BASELINES.get(method, {})}
        if method == "total-variation":
            defense["p"] = list(p) if isinstance(p, tuple) else p
        return Train(config=replace(config, defense=defense, seed=seed))
    fixed = {"bank": seed} if bank and training == "adversarial" else {}
    config = replace(config, defense=me_net(estimator, p, masks=masks, **fixed), seed=seed)
    if training == "adversarial":
        return Train(config=config)
    config = replace(config, every_copy=masks > 1)
    return Train(config=config, prepared=Prepare(dataset=dataset, defense=config.defense))


def surrogate_of(victim: Train) -> Train:
    """The source of black-box transfer attacks: the undefended network, same training, another seed.

    The paper trains "a copy of the victim network […] with the same training settings", whose adversary knows
    nothing of the preprocessing; so it is a copy of the network, not of the defense.
    """
    config = replace(victim.config, defense={}, every_copy=False, seed=victim.config.seed + 1)
    return Train(config=config)


def defended_surrogate_of(victim: Train) -> Train:
    """A stronger source than the paper's: the same defense, same training, another seed and other masks."""
    prepared = victim.prepared
    if prepared is not None:
        prepared = replace(prepared, seed=prepared.seed + 1)
    return replace(victim, config=replace(victim.config, seed=victim.config.seed + 1), prepared=prepared)


def clean(victim: Train) -> Evaluate:
    """The cheapest job that yields clean accuracy: the records of every attack hold the clean predictions too."""
    return Evaluate(model=victim, attack="fgsm", settings=_budget(victim), gradient=_bpda(victim))


def white_box(
    victim: Train,
    steps: int,
    *,
    epsilon: float | None = None,
    step_size: float | None = None,
    restarts: int = 1,
) -> Evaluate:
    """PGD on an undefended network, BPDA on a defended one."""
    settings = _iterative(victim, steps)
    if epsilon is not None:
        settings["epsilon"] = epsilon
    if step_size is not None:
        settings["step_size"] = step_size
    if restarts > 1:
        settings["restarts"] = restarts
    return Evaluate(model=victim, attack="pgd", settings=settings, gradient=_bpda(victim))


def extension(victim: Train, column: str, steps: int = 1000) -> Evaluate:
    """The attack of a column of `EXTENSIONS`, which the evaluation of a random defense needs as well."""
    if column == SUITE:
        return standard_suite(victim)
    gradient = "exact" if column.startswith("exact") else "bpda"
    settings = _iterative(victim, steps)
    if column.endswith("EOT"):
        settings |= {**EOT, "step_size": 5 * settings["epsilon"] / EOT["steps"]}
    return Evaluate(model=victim, attack="pgd", settings=settings, gradient=gradient)


def standard_suite(victim: Train, **threat: Any) -> Evaluate:
    """The standard suite, which chooses gradients, draws and losses itself; `threat` replaces the budget."""
    return Evaluate(model=victim, attack=SUITE, settings={**_budget(victim), "budget": "standard", **threat})


def adaptive(victim: Train, attack: Literal["approximate-input", "projected-bpda"]) -> Evaluate:
    """The paper's two adaptive attacks on ME-Net, 1000 steps."""
    return Evaluate(model=victim, attack=attack, settings=_iterative(victim, 1000), gradient="bpda")


def black_box(victim: Train, column: str) -> Evaluate:
    """The attack of a column of the black-box tables: Boundary, SPSA, or a transfer attack.

    The paper's Boundary attack has no budget: an image is robust if what 1000 steps found at any distance is
    classified correctly under fresh draws.
    """
    if column == "Boundary":
        return Evaluate(model=victim, attack="boundary", settings={"norm": "l2", "epsilon": None, "steps": 1000})
    if column == BOUNDED:
        return Evaluate(model=victim, attack="boundary", settings={**_budget(victim), "steps": 1000})
    if column.endswith(DEFENDED):
        attack, settings = gradient_attack(victim, column.removesuffix(DEFENDED))
        source = defended_surrogate_of(victim)
        return Evaluate(model=victim, attack=attack, settings=settings, surrogate=source, gradient="bpda")
    if column == "SPSA":
        settings = {**_budget(victim), "steps": 100, "samples": 2048}
        return Evaluate(model=victim, attack="spsa", settings=settings)
    attack, settings = gradient_attack(victim, column)
    return Evaluate(model=victim, attack=attack, settings=settings, surrogate=surrogate_of(victim))


def black_box_extensions(row: str, victim: Train, columns: Sequence[str]) -> tuple[Cell, ...]:
    """Where Boundary is measured, Boundary within ε too; for a ME-Net, the last PGD from a defended surrogate."""
    added = [BOUNDED] if "Boundary" in columns else []
    transferred = [column for column in columns if column.startswith("PGD")]
    if victim.config.defense.get("name") == "me-net" and transferred:
        added.append(transferred[-1] + DEFENDED)
    return tuple(Cell(row, column, black_box(victim, column), ours=True) for column in added)


def gray_box(victim: Train, column: str) -> Evaluate:
    """The attack of a column of the gray-box tables: on the network, unaware of the preprocessing."""
    attack, settings = gradient_attack(victim, column)
    return Evaluate(model=victim, attack=attack, settings=settings, gray=True)


def classifier_only(victim: Train, column: str) -> Evaluate:
    """The attack of a column of table 12: on the classifier alone, not through the preprocessing."""
    attack, settings = gradient_attack(victim, column)
    if attack == "fgsm":
        settings |= {"steps": 1, "step_size": settings["epsilon"], "random_start": False}
    return Evaluate(model=victim, attack="classifier-only", settings=settings)


def gradient_attack(victim: Train, column: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of the attack that a column is headed by: FGSM, PGD 7, CW κ=20, CW (κ = 50)."""
    word, _, rest = column.partition(" ")
    if word == "FGSM":
        return "fgsm", _budget(victim)
    if word == "PGD":
        return "pgd", _iterative(victim, int(rest))
    if word == "CW":
        return "cw", {**_iterative(victim, 40), "kappa": int(rest.partition("=")[2] or 50)}
    raise ConfigurationError(f"unknown column {column!r}; choose from FGSM, PGD STEPS, CW and CW κ=CONFIDENCE")


def schedules(dataset: str) -> tuple[Schedule, ...]:
    """The schedules of p in the tables of a dataset."""
    return (HIGH, MIDDLE, LOW, LOWEST) if dataset in ("mnist", "svhn") else (HIGH, MIDDLE, LOW)


def white_box_steps(dataset: str) -> tuple[int, ...]:
    """The steps of a dataset's white-box attacks; at MNIST's large ε the paper starts at 40."""
    return tuple(steps for steps in STEPS if steps >= 40) if dataset == "mnist" else STEPS


def gradient_columns(dataset: str) -> tuple[str, ...]:
    """The attacks of the gray-box tables, which transfer in the black-box tables."""
    steps = (40, 100) if dataset == "mnist" else (7, 20, 40)
    return ("FGSM", *(f"PGD {count}" for count in steps), "CW κ=20", "CW κ=50")


def black_box_table(name: str, dataset: str, label: str, baselines: tuple[Cell, ...] = ()) -> Table:
    """Transfer, Boundary and SPSA attacks on the vanilla network, the baselines, and ME-Net by schedule of p."""
    columns = ("Clean", *gradient_columns(dataset), "Boundary", "SPSA")
    cells = (*black_box_row("Vanilla", model(dataset, "vanilla"), columns), *baselines)
    for p in schedules(dataset):
        row = f"ME-Net · {format_schedule(p)}"
        cells += black_box_row(row, model(dataset, p=p), columns)
    return Table(name, f"{NAMES[dataset]}, black-box", cells, label)


def gray_box_table(name: str, dataset: str, label: str) -> Table:
    """Gradient attacks on ME-Net's network by an adversary unaware of the preprocessing, by schedule of p."""
    cells: tuple[Cell, ...] = ()
    for p in schedules(dataset):
        row = f"ME-Net · {format_schedule(p)}"
        cells += attack_row(row, model(dataset, p=p), gradient_columns(dataset), gray_box)
    return Table(name, f"{NAMES[dataset]}, gray-box", cells, label)


def white_box_table(name: str, dataset: str, label: str) -> Table:
    """BPDA on ME-Net with and without adversarial training, by schedule of p, next to Madry."""
    steps = white_box_steps(dataset)
    cells = white_box_row("Madry · Adv. train", model(dataset, "madry"), steps)
    for words, training in TRAININGS:
        for p in schedules(dataset):
            row = f"ME-Net · {format_schedule(p)} · {words}"
            cells += white_box_row(row, model(dataset, "me-net", training, p), steps)
    return Table(name, f"{NAMES[dataset]}, white-box", cells, label)


def attack_row(
    row: str, victim: Train, columns: Sequence[str], attack: Callable[[Train, str], Evaluate]
) -> tuple[Cell, ...]:
    """Robust accuracy under the attack that each column names; clean accuracy in the column Clean."""
    return tuple(
        clean_cell(row, column, victim) if column == "Clean" else Cell(row, column, attack(victim, column))
        for column in columns
    )


def black_box_row(row: str, victim: Train, columns: Sequence[str]) -> tuple[Cell, ...]:
    """Robust accuracy under the attacks of the black-box tables, and the extensions."""
    return (*attack_row(row, victim, columns, black_box), *black_box_extensions(row, victim, columns))


def white_box_row(
    row: str, victim: Train, steps: Sequence[int], *, clean: bool = True, top: int = 1
) -> tuple[Cell, ...]:
    """Clean accuracy, white-box attacks by number of steps, and the extensions."""
    cells = [clean_cell(row, "Clean", victim, top)] if clean else []
    cells += [Cell(row, str(count), white_box(victim, count), top=top) for count in steps]
    return (*cells, *extension_cells(row, victim, max(steps), top))


def summary_row(row: str, pure: Train, trained: Train) -> tuple[Cell, ...]:
    """Clean and black-box accuracy of one model, white-box accuracy of another, adversarially trained one."""
    return (
        clean_cell(row, "Clean", pure),
        Cell(row, "Black-box", black_box(pure, "PGD 40")),
        Cell(row, "White-box", white_box(trained, 1000)),
        *extension_cells(row, trained),
    )


def clean_cell(row: str, column: str, victim: Train, top: int = 1) -> Cell:
    """Clean accuracy of a model."""
    return Cell(row, column, clean(victim), clean=True, top=top)


def extension_cells(
    row: str, victim: Train, steps: int = 1000, top: int = 1, prefix: str = ""
) -> tuple[Cell, ...]:
    """Exact gradients and EOT, for ME-Net only, which has random masks and a differentiable estimator."""
    if victim.config.defense.get("name") != "me-net":
        return ()
    return tuple(
        Cell(row, f"{prefix} {column}".strip(), extension(victim, column, steps), top=top, ours=True)
        for column in EXTENSIONS
    )


def _budget(victim: Train) -> dict[str, Any]:
    return {"epsilon": victim.config.epsilon}


def _iterative(victim: Train, steps: int) -> dict[str, Any]:
    return {**_budget(victim), "steps": steps, "step_size": victim.config.step_size}


def _bpda(victim: Train) -> str | None:
    return "bpda" if victim.config.defense else None
