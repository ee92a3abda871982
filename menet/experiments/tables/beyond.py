"""Tables beyond the paper: certificates, what estimation adds, all estimators, related defenses, time."""

from dataclasses import replace
from typing import Any

from menet.evaluation import CertificateSettings
from menet.evaluation.certify import Decision
from menet.experiments.jobs import Certify, Evaluate, Train, format_schedule
from menet.experiments.measures import EstimationError, Timing
from menet.experiments.plan import NAMES, Cell, Table
from menet.experiments.tables import (
    HIGH,
    LOW,
    SUITE,
    Method,
    black_box,
    clean,
    clean_cell,
    extension,
    gray_box,
    model,
    schedules,
    standard_suite,
    white_box,
)
from menet.training import TrainingConfig, recipes
from menet.training.recipes import me_net

RADII = (0, 1, 2, 4, 8, 12)
"""Perturbed pixels (L0) that are certified against."""
EXPERTS = ("experts-3x64", "experts-1x64", "experts-1x49", "experts-1x25")
"""One network for each cell of so many lattices; the first is certified by either decision."""
EXPERT_EPOCHS, MASKED_RATE = 40, 2e-3
"""The recipe's learning rate suits experts; networks behind masks take a smaller one, and half of the epochs."""
ENCODINGS: dict[str, dict[str, str]] = {
    "ablation": {"encoding": "ablation"},
    "zeros": {},
    "USVT": {"estimator": "usvt"},
    "nuclear norm": {"estimator": "nuclear-norm"},
    "nuclear norm and mask": {"estimator": "nuclear-norm", "encoding": "estimate+mask"},
}
"""What a network can see of a masked image."""
PREPROCESSINGS: dict[str, dict[str, Any]] = {
    "USVT": me_net("usvt"),
    "Soft-Impute": me_net("soft-impute"),
    "Nuclear norm": me_net("nuclear-norm"),
    "Tubal nuclear norm": me_net("tubal"),
    "Thermometer": {"name": "thermometer"},
    "Total variation": {"name": "total-variation"},
    "JPEG": {"name": "jpeg"},
    "Image quilting": {"name": "image-quilting"},
    "Defense-GAN": {"name": "defense-gan", "gan_steps": 1},
}
ESTIMATORS = {
    "Mask only": "mask-only",
    "USVT": "usvt",
    "Soft-Impute": "soft-impute",
    "Nuclear norm": "nuclear-norm",
    "Tubal nuclear norm": "tubal",
}
"""The estimators, and masks alone, of which the network sees the observed entries."""
RELATED: dict[str, Method] = {
    "Vanilla": "vanilla",
    "Total variation": "total-variation",
    "Image quilting": "image-quilting",
    "Defense-GAN": "defense-gan",
    "ME-Net": "me-net",
}
"""The defenses that the paper cites as its neighbors, between the undefended network and ME-Net."""
SEEDS = (0, 1)
"""Trainings of each row that a claim is to rest on."""
AVERAGED = 4
"""Draws that the training attack averages in the row that does."""
FEW = 8
"""Pixels that an attack may change in the column of ℓ0."""
RELATED_DRAWS = 10
"""Fresh draws that score them: a projection of Defense-GAN takes thousands of passes through its generator."""


def certificate() -> Table:
    """Certified accuracy of votes against L0 perturbations: experts for cells, and ME-Nets by random masks."""
    cells = []
    for dataset, network, probabilities in (
        ("mnist", "lenet", (0.02, 0.03, 0.045, 0.1, 0.2)),
        ("cifar10", "compact", (0.073,)),
    ):
        recipe = recipes.by_name(dataset, "certificate")
        experts: list[tuple[str, Decision]] = [(name, "pairwise") for name in EXPERTS]
        rows: list[tuple[str, TrainingConfig, Decision]] = [
            (f"{name}, {decision}", replace(recipe, model=name, epochs=EXPERT_EPOCHS), decision)
            for name, decision in (*experts, (EXPERTS[0], "plurality"))
        ]
        masked = {
            f"ablation {format_schedule(p)}": (
                network,
                me_net("mask-only", p, mask="pixels", encoding="ablation"),
            )
            for p in probabilities
        }
        if dataset == "mnist":
            # Does estimating help a certificate? The same p and training, but for what the network sees.
            for name, encoding in ENCODINGS.items():
                chosen = {"estimator": "mask-only", **encoding}
                defense = me_net(p=0.057, mask="pixels", **chosen)
                masked[f"{name} {format_schedule(0.057)}, perceptron"] = ("mlp", defense)
        for name, (body, defense) in masked.items():
            config = replace(recipe, model=body, defense=defense, learning_rate=MASKED_RATE)
            rows.append((f"{name}, pairwise", config, "pairwise"))
        for name, config, decision in rows:
            settings = CertificateSettings(selection=100, estimation=10_000, decision=decision)
            job = Certify(model=Train(config=config), settings=settings)
            for radius in RADII:
                row, column = f"{NAMES[dataset]} · {name}", f"{radius} pixels"
                cells.append(Cell(row, column, job, clean=True, radius=radius, ours=True))
    note = (
        "Certified: the vote is correct, and no perturbation of that many pixels can change it. Those of experts "
        "are deterministic; each of the others is wrong with probability at most 0.1 %. As their papers report, "
        "the median radius is 8 pixels on MNIST and 7 on CIFAR-10 for Levine & Feizi (2020), 12 and 13 for "
        "Hammoudeh & Lowd (2023)."
    )
    return Table("certificate", "Certified accuracy by L0 radius", tuple(cells), note=note)


def estimation() -> Table:
    """Adversarial training without a defense, behind masks alone, and behind estimates, in several ways."""
    cells: list[Cell] = []
    for dataset in ("mnist", "cifar10"):
        for seed in SEEDS:
            for name, victim in _adversarially_trained(dataset, seed).items():
                row = f"{NAMES[dataset]} · {name} · seed {seed}"
                cells += [
                    clean_cell(row, "Clean", victim),
                    Cell(row, "40 steps", white_box(victim, 40)),
                    Cell(row, SUITE, standard_suite(victim)),
                    Cell(row, f"{FEW} pixels", standard_suite(victim, norm="l0", epsilon=FEW)),
                ]
    note = (
        "All are trained adversarially, by PGD unless a row says TRADES: for as many epochs, at scale cores for "
        "as long. The column 40 steps is PGD, and behind a defense BPDA with one draw a step, the paper's. "
        "The training attack passes gradients by BPDA unless a row says exact, with one draw unless it says more."
        f" The column {FEW} pixels is the standard suite on any change of so many, which no row was trained for."
    )
    title = "What estimation adds to adversarial training"
    return Table("estimation", title, tuple(replace(cell, ours=True) for cell in cells), note=note)


def _adversarially_trained(dataset: str, seed: int) -> dict[str, Train]:
    def behind(p: tuple[float, float], estimator: str = "nuclear-norm", **settings: Any) -> Train:
        trained = model(dataset, "me-net", "adversarial", p, estimator=estimator, seed=seed)
        return replace(trained, config=replace(trained.config, defense={**trained.config.defense, **settings}))

    def changed(trained: Train, **settings: Any) -> Train:
        return replace(trained, config=replace(trained.config, **settings))

    plain, menet, exact = model(dataset, "madry", seed=seed), behind(LOW), behind(LOW, gradient="exact")
    usvt = behind(LOW, "usvt")
    rows = {
        "no defense": plain,
        "no defense, TRADES": changed(plain, objective="trades"),
        f"mask only, {format_schedule(HIGH)}": behind(HIGH, "mask-only"),
        f"mask only, {format_schedule(LOW)}": behind(LOW, "mask-only"),
        f"masks, divided by p, {format_schedule(LOW)}": _divided_by_p(usvt),
        f"USVT, {format_schedule(LOW)}": usvt,
        f"ME-Net, {format_schedule(HIGH)}": behind(HIGH),
        f"ME-Net, {format_schedule(LOW)}": menet,
        f"ME-Net, {format_schedule(LOW)}, exact": exact,
        f"ME-Net, {format_schedule(LOW)}, exact, {AVERAGED} draws": changed(exact, eot=AVERAGED),
        f"ME-Net, {format_schedule(LOW)}, TRADES": changed(menet, objective="trades"),
    }
    if dataset != "mnist":
        # With one channel the tensor is the matrix, and masks of pixels are masks of entries.
        rows[f"ME-Net, {format_schedule(LOW)}, tubal"] = behind(LOW, "tubal")
        rows[f"ME-Net, {format_schedule(LOW)}, masks of pixels"] = behind(LOW, mask="pixels")
    return rows


def _divided_by_p(usvt: Train) -> Train:
    """USVT with all singular values kept: what was observed over the observed fraction, and no estimate."""
    defense = {**usvt.config.defense, "estimator": {"name": "usvt", "keep": 1.0}}
    config = replace(usvt.config, defense=defense)
    return Train(config=config, prepared=usvt.prepared and replace(usvt.prepared, defense=config.defense))


def estimators() -> Table:
    """Every estimator and masks alone: error, clean, black-box and white-box accuracy, the suite, time."""
    cells: list[Cell] = []
    for dataset in ("mnist", "cifar10"):
        for name, estimator in ESTIMATORS.items():
            if dataset == "mnist" and estimator == "tubal":
                continue  # with one channel the tensor is the matrix
            row, alone = f"{NAMES[dataset]} · {name}", me_net(estimator, masks=1)
            pure = model(dataset, p=HIGH, estimator=estimator)
            trained = model(dataset, "me-net", "adversarial", LOW, estimator=estimator)
            cells += [
                Cell(
                    row, f"RMSE, {format_schedule(p)}", EstimationError(dataset=dataset, defense=alone | {"p": p})
                )
                for p in (0.5, 0.9)
            ]
            cells += [
                clean_cell(row, "Clean", pure),
                Cell(row, "Black-box", black_box(pure, "PGD 40")),
                Cell(row, "White-box", white_box(trained, 1000)),
                Cell(row, SUITE, standard_suite(trained)),
                Cell(row, "ms per image", Timing(dataset=dataset, defense=alone | {"p": 0.5})),
            ]
    note = (
        "RMSE: root mean square error of an image's estimate, pixels in [0,1], mean over test images. Clean and "
        f"black-box accuracy are of a model trained on estimates, {format_schedule(HIGH)}; those under BPDA and "
        f"the {SUITE} suite are of one trained adversarially, {format_schedule(LOW)}. Time is that of an "
        f"estimate, {format_schedule(0.5)}, in a batch, on one core."
    )
    title = "Estimators: error, accuracy, time"
    return Table("estimators", title, tuple(replace(cell, ours=True) for cell in cells), note=note)


def published_code() -> Table:
    """What the published code has and the paper does not say: USVT, attacks that stop at the smallest budget."""
    cells: list[Cell] = []
    for dataset in ("mnist", "cifar10"):
        menets = {
            f"{name}, {format_schedule(p)}": model(dataset, p=p, estimator=estimator)
            for name, estimator in {"Nuclear norm": "nuclear-norm", "USVT": "usvt"}.items()
            for p in schedules(dataset)
        }
        for p in schedules(dataset):
            usvt = model(dataset, p=p, estimator="usvt")
            menets[f"Masks, divided by p, {format_schedule(p)}"] = _divided_by_p(usvt)
        for name, victim in {"Vanilla": model(dataset, "vanilla"), **menets}.items():
            row = f"{NAMES[dataset]} · {name}"
            attacks = {"Black-box": black_box(victim, "PGD 40"), "White-box": white_box(victim, 40)}
            if name in menets:
                attacks["Gray-box"] = gray_box(victim, "PGD 40")
            cells.append(clean_cell(row, "Clean", victim))
            for column, within in attacks.items():
                cells.append(Cell(row, column, within))
                cells.append(Cell(row, f"{column}, smallest", replace(within, attack="pgd-smallest")))
            if name in menets:
                cells.append(Cell(row, SUITE, standard_suite(victim)))
    note = (
        "PGD of 40 steps within ε, and within the smallest budget that fools the attacked model, as foolbox 1 "
        "ran it unless told otherwise and the published code of ME-Net does for its transfer attacks. Black-box: "
        "on a vanilla network of another seed. White-box: on the network itself, behind ME-Net by BPDA with one "
        "draw a step. Gray-box: on the network behind ME-Net alone. Masks, divided by p: USVT with all singular "
        "values kept, which estimates nothing. The paper has the nuclear norm where it does "
        "not say otherwise, the code USVT. No row is trained adversarially."
    )
    title = "USVT and the smallest budget, as in the published code"
    return Table("published-code", title, tuple(replace(cell, ours=True) for cell in cells), note=note)


def related_defenses() -> Table:
    """Image quilting, total variation and Defense-GAN, without adversarial training, next to ME-Net."""
    cells = []
    for dataset in ("mnist", "cifar10"):
        for name, method in RELATED.items():
            row, victim = f"{NAMES[dataset]} · {name}", model(dataset, method)
            jobs = {"FGSM": clean(victim), "PGD 100": white_box(victim, 100)}
            if method in ("total-variation", "defense-gan", "me-net"):
                jobs["exact"] = extension(victim, "exact", 100)
            if method != "vanilla":
                jobs["BPDA+EOT"] = extension(victim, "BPDA+EOT")
            if method == "defense-gan":
                found = {"epsilon": victim.config.epsilon, "steps": 100, "starts": 10, "eot": 10}
                jobs["on-manifold"] = Evaluate(model=victim, attack="on-manifold", settings=found)
            scored = {column: replace(job, draws=RELATED_DRAWS) for column, job in jobs.items()}
            cells.append(Cell(row, "Clean", scored["FGSM"], clean=True, ours=True))
            cells += [Cell(row, column, job, ours=True) for column, job in scored.items()]
    note = (
        "Image quilting and total variation are trained behind their preprocessing, Defense-GAN on the images. "
        "Its exact gradients pass the last ten steps of the projection; those of image quilting are zero."
    )
    return Table("related-defenses", "Related defenses", tuple(cells), note=note)


def preprocessing_time() -> Table:
    """Milliseconds per image of each preprocessing, on the machine that measured."""
    cells = []
    for name, defense in PREPROCESSINGS.items():
        for p in (0.5, 0.9) if defense["name"] == "me-net" else (None,):
            chosen = defense if p is None else {**defense, "p": p, "masks": 1}
            row = name if p is None else f"{name} · {format_schedule(p)}"
            cells.append(Cell(row, "ms per image", Timing(dataset="cifar10", defense=chosen), ours=True))
    return Table("cost", "Time of each preprocessing", tuple(cells), note="Best of five rounds, in a batch.")
