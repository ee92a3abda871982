"""Ours: the tensor estimator beside the nuclear norm, as the paper compares estimators."""

from dataclasses import replace

from menet.experiments.paper import HIGH, LOW, model
from menet.experiments.plan import Cell, Table
from menet.experiments.tables.estimators import estimator_row


def plan() -> Table:
    cells: tuple[Cell, ...] = ()
    for name, estimator in (("Tensor", "tensor"), ("Nuc. Norm", "nuclear-norm"), ("mask only", "mask-only")):
        pure = model("cifar10", p=HIGH, estimator=estimator)
        trained = model("cifar10", "me-net", "adversarial", LOW, estimator=estimator)
        cells += estimator_row(f"ME-Net - {name}", pure, trained)
    cells = tuple(replace(cell, ours=True) for cell in cells)
    note = "Mask only is the ablation: entries are dropped and nothing is estimated."
    return Table("tensor-estimator", "CIFAR-10, the tensor estimator", cells, note=note)
