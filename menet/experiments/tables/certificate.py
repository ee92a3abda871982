"""Ours: the share of images whose vote no change of a few pixels can turn."""

from menet.evaluation import CertificateSettings
from menet.experiments.jobs import Certify
from menet.experiments.paper import LOWEST, Schedule, model
from menet.experiments.plan import NAMES, Cell, Table
from menet.experiments.rows import words

RADII = (0, 1, 2, 4, 8)
SCHEDULES: tuple[Schedule, ...] = (0.05, 0.1, LOWEST)


def plan() -> Table:
    cells = []
    for dataset in ("mnist", "cifar10"):
        for p in SCHEDULES:
            job = Certify(model=model(dataset, p=p, masks=1 if isinstance(p, float) else 10), settings=SETTINGS)
            for radius in RADII:
                row, column = f"{NAMES[dataset]} · {words(p)}", f"{radius} pixels"
                cells.append(Cell(row, column, job, clean=True, radius=radius, ours=True))
    note = "Certified: right, and the vote cannot be turned by changing so many pixels, each wrong at most 0.1 %."
    return Table("certificate", "Certified accuracy by changed pixels", tuple(cells), note=note)


SETTINGS = CertificateSettings(selection=100, estimation=10_000)
