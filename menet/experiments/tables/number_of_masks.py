"""CIFAR-10: how many masks ME-Net is trained with (appendix)."""

from menet.experiments.paper import HIGH, LOW, Schedule, model
from menet.experiments.plan import Table
from menet.experiments.rows import words
from menet.experiments.tables.estimators import estimator_row


def plan() -> Table:
    vanilla = model("cifar10", "vanilla")
    cells = estimator_row("Vanilla", vanilla, vanilla)
    kinds: tuple[tuple[int, Schedule], ...] = ((1, 0.9), (1, 0.5), (5, HIGH), (5, LOW), (10, HIGH), (10, LOW))
    for masks, p in kinds:
        pure = model("cifar10", p=p, masks=masks)
        trained = model("cifar10", "me-net", "adversarial", p, masks=masks)
        cells += estimator_row(f"{masks} · ME-Net · {words(p)}", pure, trained)
    note = "Clean and black-box of a model without adversarial training, white-box of one with it."
    return Table("table27", "CIFAR-10, number of masks", cells, "appendix mask number", note)
