"""CIFAR-10: the estimators compared (main text)."""

from menet.experiments import rows
from menet.experiments.jobs import Train
from menet.experiments.paper import HIGH, LOW, black_box, model, white_box
from menet.experiments.plan import Cell, Table

ESTIMATORS = {"USVT": "usvt", "Soft-Imp.": "soft-impute", "Nuc. Norm": "nuclear-norm"}


def plan() -> Table:
    vanilla = model("cifar10", "vanilla")
    cells = estimator_row("Vanilla", vanilla, vanilla)
    for name, estimator in ESTIMATORS.items():
        pure = model("cifar10", p=HIGH, estimator=estimator)
        trained = model("cifar10", "me-net", "adversarial", LOW, estimator=estimator)
        cells += estimator_row(f"ME-Net - {name}", pure, trained)
    note = "Clean and black-box of a model without adversarial training, white-box of one with it."
    return Table("table6", "CIFAR-10, estimators compared", cells, "me methods compare", note)


def estimator_row(row: str, pure: Train, trained: Train) -> tuple[Cell, ...]:
    """Clean and black-box accuracy of one model, white-box of another."""
    return (
        rows.clean_cell(row, "Clean", pure),
        Cell(row, "Black-box", black_box(pure, "PGD 40")),
        Cell(row, "White-box", white_box(trained, 1000)),
        *rows.beyond(row, trained),
    )
