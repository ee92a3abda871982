"""SVHN: white-box attacks, with and without adversarial training."""

from menet.experiments import rows
from menet.experiments.paper import HIGH, LOW, LOWEST, MIDDLE, Training, model
from menet.experiments.plan import Table


def plan() -> Table:
    cells = rows.white("Madry · Adv. train", model("svhn", "madry"), rows.STEPS)
    kinds: tuple[tuple[str, Training], ...] = (("Prep.", "standard"), ("Prep. + Adv. train", "adversarial"))
    for name, training in kinds:
        for p in (HIGH, MIDDLE, LOW, LOWEST):
            victim = model("svhn", "me-net", training, p)
            cells += rows.white(f"ME-Net · {rows.words(p)} · {name}", victim, rows.STEPS)
    return Table("table19", "SVHN, white-box", cells, "appendix svhn white")
