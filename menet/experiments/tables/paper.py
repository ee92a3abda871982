"""The paper's tables: 1 to 7 of the main text, 9 to 27 of the appendix.

CIFAR-10 has tables 1 to 6, 9 to 13, 23 to 25 and 27; MNIST 14 to 16, SVHN 17 to 19, Tiny-ImageNet 20 to 22:
one each of black-box, gray-box and white-box attacks. Tables 7 and 26 compare the four.
"""

from dataclasses import replace

from menet.experiments.jobs import format_schedule
from menet.experiments.plan import NAMES, Cell, Criterion, Table
from menet.experiments.tables import (
    HIGH,
    LOW,
    LOWEST,
    MIDDLE,
    STEPS,
    WIDE,
    Method,
    Schedule,
    Training,
    adaptive,
    attack_row,
    black_box,
    black_box_row,
    black_box_table,
    classifier_only,
    clean_cell,
    extension_cells,
    gradient_columns,
    gray_box_table,
    model,
    schedules,
    summary_row,
    white_box,
    white_box_row,
    white_box_table,
)

ESTIMATORS = {"USVT": "usvt", "Soft-Imp.": "soft-impute", "Nuc. Norm": "nuclear-norm"}
"""By the name that the paper's rows give them."""
TWO_MODELS = "Clean and black-box accuracy without adversarial training, white-box accuracy with it."
BANKS = "Both learn from that many fixed masks of each image; adversarial training elsewhere draws fresh masks."
MOST_ACCURATE: dict[str, Schedule] = {"mnist": LOW, "cifar10": HIGH, "svhn": HIGH, "tiny-imagenet": MIDDLE}
"""The schedule with the highest clean accuracy under adversarial training."""
MOST_ROBUST: dict[str, Schedule] = {"mnist": LOWEST, "cifar10": LOW, "svhn": LOWEST, "tiny-imagenet": LOW}
"""The schedule with the highest white-box accuracy."""


def table1() -> Table:
    """Transfer attacks, compared with other defenses."""
    columns = ("CW", "FGSM", "PGD 7")
    madry, thermometer = model("cifar10", "madry"), model("cifar10", "thermometer", "adversarial")
    cells = (
        *black_box_row("Vanilla · SGD", model("cifar10", "vanilla"), columns),
        # The paper prints the same 78.7 under κ = 20 in table 9.
        Cell("Madry · Adv. train", "CW", black_box(madry, "CW κ=20")),
        *black_box_row("Madry · Adv. train", madry, columns[1:]),
        *black_box_row("Thermometer · SGD", model("cifar10", "thermometer"), ("PGD 7",)),
        *black_box_row("Thermometer · Adv. train", thermometer, ("PGD 7",)),
        *black_box_row("ME-Net · SGD", model("cifar10", p=HIGH), columns),
    )
    return Table("table1", "CIFAR-10, black-box, compared with other defenses", cells, "cifar black compare")


def table2() -> Table:
    """Transfer, Boundary and SPSA attacks."""
    columns = ("CW", "FGSM", "PGD 7", "PGD 20", "PGD 40", "Boundary", "SPSA")
    cells = (
        *black_box_row("Vanilla", model("cifar10", "vanilla"), columns),
        *black_box_row("ME-Net", model("cifar10", p=HIGH), columns),
    )
    return Table("table2", "CIFAR-10, black-box, by attack", cells, "cifar black ours")


def table3() -> Table:
    """White-box attacks on preprocessing alone, without adversarial training."""
    compared: tuple[tuple[str, Method, int], ...] = (
        ("Thermometer", "thermometer", 40),
        ("PixelDefend", "pixel-defend", 100),
        ("TV Minimization", "total-variation", 100),
        ("ME-Net", "me-net", 1000),
    )
    cells: tuple[Cell, ...] = ()
    for name, method, steps in compared:
        row, victim = f"{name} · Prep. · {steps}", model("cifar10", method, p=LOW)
        cells += (Cell(row, "Accuracy", white_box(victim, steps)), *extension_cells(row, victim))
    return Table("table3", "CIFAR-10, white-box, preprocessing alone", cells, "cifar white compare")


def table4() -> Table:
    """White-box attacks of 1000 steps on adversarially trained models."""
    compared: tuple[tuple[str, str, Method, str | None], ...] = (
        ("ResNet-18 · Madry", "Adv. train", "madry", None),
        ("ResNet-18 · ME-Net", "Prep. + Adv. train", "me-net", None),
        ("WideResNet · Madry", "Adv. train", "madry", WIDE),
        ("WideResNet · Thermometer", "Prep. + Adv. train", "thermometer", WIDE),
        ("WideResNet · ME-Net", "Prep. + Adv. train", "me-net", WIDE),
    )
    cells: tuple[Cell, ...] = ()
    for name, kind, method, network in compared:
        row = f"{name} · {kind} · 1000"
        victim = model("cifar10", method, "adversarial", LOW, network=network)
        cells += (Cell(row, "Accuracy", white_box(victim, 1000)), *extension_cells(row, victim))
    return Table("table4", "CIFAR-10, white-box, adversarial training", cells, "cifar white sota")


def table5() -> Table:
    """The paper's two adaptive attacks."""
    cells: tuple[Cell, ...] = ()
    kinds: tuple[tuple[str, Training], ...] = (("Pure", "standard"), ("Adversarial", "adversarial"))
    for name, training in kinds:
        row, victim = f"ME-Net · {name} · 1000", model("cifar10", "me-net", training, LOW)
        cells += (
            Cell(row, "Approx. Input", adaptive(victim, "approximate-input")),
            Cell(row, "Projected BPDA", adaptive(victim, "projected-bpda")),
            *extension_cells(row, victim),
        )
    return Table("table5", "CIFAR-10, adaptive attacks", cells, "adaptive attacks")


def table6() -> Table:
    """Estimators compared."""
    vanilla = model("cifar10", "vanilla")
    cells = summary_row("Vanilla", vanilla, vanilla)
    for name, estimator in ESTIMATORS.items():
        pure = model("cifar10", p=HIGH, estimator=estimator)
        trained = model("cifar10", "me-net", "adversarial", LOW, estimator=estimator)
        cells += summary_row(f"ME-Net - {name}", pure, trained)
    return Table("table6", "CIFAR-10, estimators compared", cells, "me methods compare", TWO_MODELS)


def table7() -> Table:
    """Clean accuracy, four datasets."""
    cells: tuple[Cell, ...] = ()
    for dataset, name in NAMES.items():
        trained = model(dataset, "me-net", "adversarial", MOST_ACCURATE[dataset])
        cells += (
            clean_cell("Vanilla · Pure", name, model(dataset, "vanilla")),
            clean_cell("ME-Net · Pure", name, model(dataset, p=HIGH)),
            clean_cell("Madry · Adversarial", name, model(dataset, "madry")),
            clean_cell("ME-Net · Adversarial", name, trained),
        )
    return Table("table7", "Clean accuracy, four datasets", cells, "generalization clean")


def table9() -> Table:
    """Black-box attacks, all schedules of p."""
    madry = ("Clean", "FGSM", "PGD 7", "CW κ=20")
    thermometer = model("cifar10", "thermometer", "adversarial")
    baselines = (
        *black_box_row("Madry", model("cifar10", "madry"), madry),
        *black_box_row("Thermometer", thermometer, ("Clean", "PGD 7")),
    )
    return black_box_table("table9", "cifar10", "appendix cifar black", baselines)


def table10() -> Table:
    """Gray-box attacks."""
    return gray_box_table("table10", "cifar10", "appendix cifar gray")


def table11() -> Table:
    """White-box attacks on preprocessing alone, all schedules of p."""
    steps = (7, 20, 40, 100)
    cells = (
        *white_box_row("Vanilla", model("cifar10", "vanilla"), steps, clean=False),
        *white_box_row("Thermometer · Prep.", model("cifar10", "thermometer"), (40, 100), clean=False),
        *white_box_row("PixelDefend · Prep.", model("cifar10", "pixel-defend"), (100,), clean=False),
        *white_box_row("TV Minimization · Prep.", model("cifar10", "total-variation"), steps, clean=False),
    )
    finer: tuple[Schedule, ...] = (HIGH, (0.7, 0.9), MIDDLE, (0.5, 0.7), LOW)
    for p in finer:
        row = f"ME-Net · {format_schedule(p)} · Prep."
        cells += white_box_row(row, model("cifar10", p=p), steps, clean=False)
    title = "CIFAR-10, white-box, preprocessing alone, by schedule of p"
    return Table("table11", title, cells, "appendix cifar white pure")


def table12() -> Table:
    """White-box attacks on the classifier alone, not through the preprocessing."""
    cells: tuple[Cell, ...] = ()
    for p in schedules("cifar10"):
        row, victim = f"ME-Net · {format_schedule(p)}", model("cifar10", p=p)
        cells += attack_row(row, victim, gradient_columns("cifar10"), classifier_only)
        cells += extension_cells(row, victim, 40)
    title = "CIFAR-10, white-box, attacks on the classifier alone"
    return Table("table12", title, cells, "appendix cifar white pure add")


def table13() -> Table:
    """White-box attacks on adversarially trained models, two networks."""
    kind = "Prep. + Adv. train"
    cells = white_box_row("ResNet-18 · Madry · Adv. train", model("cifar10", "madry"), STEPS)
    for p in schedules("cifar10"):
        victim = model("cifar10", "me-net", "adversarial", p)
        cells += white_box_row(f"ResNet-18 · ME-Net {format_schedule(p)} · {kind}", victim, STEPS)
    madry = model("cifar10", "madry", network=WIDE)
    cells += white_box_row("Wide-ResNet · Madry · Adv. train", madry, STEPS)
    thermometer = model("cifar10", "thermometer", "adversarial", network=WIDE)
    cells += white_box_row(f"Wide-ResNet · Thermometer · {kind}", thermometer, STEPS)
    for p in (MIDDLE, LOW):
        victim = model("cifar10", "me-net", "adversarial", p, network=WIDE)
        cells += white_box_row(f"Wide-ResNet · ME-Net {format_schedule(p)} · {kind}", victim, STEPS)
    title = "CIFAR-10, white-box, adversarial training, by network and schedule of p"
    return Table("table13", title, cells, "appendix cifar white adv")


def table14() -> Table:
    """MNIST, black-box attacks."""
    madry = ("Clean", *gradient_columns("mnist"))
    baselines = (
        *black_box_row("Madry", model("mnist", "madry"), madry),
        *black_box_row("Thermometer", model("mnist", "thermometer"), ("Clean", "PGD 40")),
    )
    return black_box_table("table14", "mnist", "appendix mnist black", baselines)


def table15() -> Table:
    """MNIST, gray-box attacks."""
    return gray_box_table("table15", "mnist", "appendix mnist gray")


def table16() -> Table:
    """MNIST, white-box attacks, with and without adversarial training."""
    return white_box_table("table16", "mnist", "appendix mnist white")


def table17() -> Table:
    """SVHN, black-box attacks."""
    return black_box_table("table17", "svhn", "appendix svhn black")


def table18() -> Table:
    """SVHN, gray-box attacks."""
    return gray_box_table("table18", "svhn", "appendix svhn gray")


def table19() -> Table:
    """SVHN, white-box attacks, with and without adversarial training."""
    return white_box_table("table19", "svhn", "appendix svhn white")


def table20() -> Table:
    """Tiny-ImageNet, black-box attacks, top-1 accuracy."""
    return black_box_table("table20", "tiny-imagenet", "appendix timgnet black")


def table21() -> Table:
    """Tiny-ImageNet, gray-box attacks, top-1 accuracy."""
    return gray_box_table("table21", "tiny-imagenet", "appendix timgnet gray")


def table22() -> Table:
    """Tiny-ImageNet, white-box attacks on adversarially trained models, top-1 and top-5 accuracy."""
    cells: tuple[Cell, ...] = ()
    for top in (1, 5):
        cells += white_box_row(f"Top-{top} · Madry · Adv. train", model("tiny-imagenet", "madry"), STEPS, top=top)
        for p in schedules("tiny-imagenet"):
            row = f"Top-{top} · ME-Net {format_schedule(p)} · Prep. + Adv. train"
            victim = model("tiny-imagenet", "me-net", "adversarial", p)
            cells += white_box_row(row, victim, STEPS, top=top)
    return Table("table22", "Tiny-ImageNet, white-box", cells, "appendix timgnet white")


def table23() -> Table:
    """Estimators under black-box attacks."""
    columns = ("Clean", *gradient_columns("cifar10"))
    cells = black_box_row("Vanilla", model("cifar10", "vanilla"), columns)
    for name, estimator in ESTIMATORS.items():
        victim = model("cifar10", p=HIGH, estimator=estimator)
        cells += black_box_row(f"ME-Net - {name} · Prep.", victim, columns)
    return Table("table23", "CIFAR-10, estimators, black-box", cells, "appendix me methods black")


def table24() -> Table:
    """Estimators under white-box attacks."""
    cells = white_box_row("Madry · Adv. train", model("cifar10", "madry"), STEPS)
    for name, estimator in ESTIMATORS.items():
        victim = model("cifar10", "me-net", "adversarial", LOW, estimator=estimator)
        cells += white_box_row(f"ME-Net - {name} · Prep. + Adv. train", victim, STEPS)
    return Table("table24", "CIFAR-10, estimators, white-box", cells, "appendix me methods white")


def table25() -> Table:
    """Random restarts and step sizes of a 100-step attack."""
    cells: tuple[Cell, ...] = ()
    compared: tuple[tuple[str, Method], ...] = (("Madry", "madry"), ("ME-Net", "me-net"))
    for name, method in compared:
        victim = model("cifar10", method, "adversarial", LOW)
        for pixels in (2, 4, 8):
            row = f"{name} · {pixels}/255"
            # The first 10 and 20 of 50 restarts are what a run of 10 and 20 would be.
            job = white_box(victim, 100, step_size=pixels / 255, restarts=50)
            for restarts in (10, 20, 50):
                cells += (Cell(row, str(restarts), job, criterion="hard", restarts=restarts),)
            cells += extension_cells(row, victim, 100)
    note = "Robust only if no restart succeeds; with random masks a success may also be chance."
    return Table("table25", "CIFAR-10, restarts and step sizes", cells, "appendix random start", note)


def table26() -> Table:
    """A majority vote over ten draws compared with one draw, four datasets.

    The votes have "the same p used during training": each draw takes its p from the schedule. A vote of draws
    with the schedule's mean p is an extension.
    """
    cells: tuple[Cell, ...] = ()
    kinds: tuple[tuple[str, Criterion], ...] = (("Standard", "expected"), ("Vote", "vote"))
    for steps in (40, 100, 1000):
        for name, criterion in kinds:
            for dataset, p in MOST_ROBUST.items():
                victim = model(dataset, "me-net", "adversarial", p)
                for column, top in _columns(dataset):
                    row, job = f"{steps} · {name}", white_box(victim, steps)
                    cells += (Cell(row, column, job, criterion=criterion, top=top),)
                    if criterion == "vote":
                        name_of_mean = f"{column} vote at the mean p"
                        cells += (Cell(row, name_of_mean, job, criterion="vote-mean", top=top, ours=True),)
                    extra = extension_cells(row, victim, steps, top, prefix=column)
                    cells += tuple(replace(one, criterion=criterion) for one in extra)
    return Table("table26", "Majority vote over ten draws compared with one draw", cells, "voting")


def table27() -> Table:
    """Number of masks per image in training."""
    vanilla = model("cifar10", "vanilla")
    cells = summary_row("Vanilla", vanilla, vanilla)
    kinds: tuple[tuple[int, Schedule], ...] = ((1, 0.9), (1, 0.5), (5, HIGH), (5, LOW), (10, HIGH), (10, LOW))
    for masks, p in kinds:
        pure = model("cifar10", p=p, masks=masks)
        trained = model("cifar10", "me-net", "adversarial", p, masks=masks, bank=True)
        cells += summary_row(f"{masks} · ME-Net · {format_schedule(p)}", pure, trained)
    return Table("table27", "CIFAR-10, number of masks", cells, "appendix mask number", f"{TWO_MODELS} {BANKS}")


def _columns(dataset: str) -> tuple[tuple[str, int], ...]:
    name = NAMES[dataset]
    return ((f"{name} Top-1", 1), (f"{name} Top-5", 5)) if dataset == "tiny-imagenet" else ((name, 1),)
