"""Accuracies from rows, each with an interval over the examples."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from menet.errors import ConfigurationError, RecordError
from menet.evaluation.intervals import CONFIDENCE, bounded_mean, clopper_pearson
from menet.evaluation.records import Records, Row

Criterion = Literal["single", "expected", "vote", "mean", "worst"]
Images = Literal["clean", "adversarial"]

CRITERIA: dict[Criterion, str] = {
    "single": "one fresh mask",
    "expected": "expected over masks",
    "vote": "majority of masks",
    "mean": "mean logits of masks",
    "worst": "worst of the masks",
}


@dataclass(frozen=True)
class Accuracy:
    """One number with the interval that goes with it."""

    images: str
    """clean or adversarial; restarts for the criteria over restarts."""
    criterion: str
    top: int
    value: float
    low: float
    high: float
    examples: int
    interval: str
    """clopper-pearson (yes or no per example) or chernoff-hoeffding (a share per example)."""
    confidence: float = CONFIDENCE


def accuracy(
    records: Records,
    images: Images = "adversarial",
    criterion: Criterion = "expected",
    top: int = 1,
    confidence: float = CONFIDENCE,
) -> Accuracy:
    """The accuracy of one kind over all rows of `records`."""
    right = correctness(records.rows, images, criterion, top)
    return _accuracy(right, images, criterion, top, confidence, binary=criterion != "expected")


def accuracies(records: Records, tops: Sequence[int] = (1, 5), confidence: float = CONFIDENCE) -> list[Accuracy]:
    """Every accuracy of `records`, clean beside adversarial; top-k only where there are more than k classes."""
    tops = [top for top in tops if top == 1 or top < records.evaluation["dataset"]["classes"]]
    found = [
        accuracy(records, images, criterion, top, confidence)
        for top in tops
        for criterion in get_args(Criterion)
        for images in get_args(Images)
    ]
    if any("restarts" in row for row in records.rows):
        found += restart_accuracies(records, confidence)
    return found


def restart_accuracies(records: Records, confidence: float = CONFIDENCE) -> list[Accuracy]:
    """Accuracies over the restarts of an attack, each image scored on fresh masks.

    `hard`: right for every restart (under each mask it was scored on), the paper's criterion; `expected`: the
    mean over restarts and masks.
    """
    masks = records.evaluation["scoring"]["restart_masks"]
    if not records.rows or not all("restarts" in row for row in records.rows):
        raise RecordError(f"the records of {records.label!r} have no restarts in every row")
    fooled = np.array([row["restarts"] for row in records.rows], float) / masks
    return [
        _accuracy((fooled == 0).all(1).astype(float), "restarts", "hard", 1, confidence, binary=True),
        _accuracy(1 - fooled.mean(1), "restarts", "expected", 1, confidence, binary=False),
    ]


def correctness(
    rows: Sequence[Row], images: Images = "adversarial", criterion: Criterion = "expected", top: int = 1
) -> np.ndarray:
    """How right each row is: 0 or 1, or for `expected` the share of masks under which it is right."""
    if not rows:
        raise RecordError("there are no rows to take an accuracy from")
    if top < 1:
        raise ConfigurationError(f"top is {top}; it must be 1 or more")
    if images not in get_args(Images):
        raise ConfigurationError(f"images is {images!r}; accepted are {', '.join(get_args(Images))}")
    if criterion == "mean":
        return np.array([row[images]["mean"]["rank"] < top for row in rows], float)
    if criterion == "vote":
        return np.array([vote_rank(row[images]["predictions"], row["label"]) < top for row in rows], float)
    right = np.array([row[images]["ranks"] for row in rows]) < top
    if criterion == "single":
        return right[:, 0].astype(float)
    if criterion == "expected":
        return right.mean(1)
    if criterion == "worst":
        return right.all(1).astype(float)
    raise ConfigurationError(f"criterion is {criterion!r}; accepted are {', '.join(get_args(Criterion))}")


def vote_rank(predictions: Sequence[int], label: int) -> int:
    """How many classes have more votes than `label`, or as many and a lower number, as `MENet.vote` decides.

    A class without a vote has no place, so it is not among the top five by chance.
    """
    votes = np.bincount(predictions, minlength=label + 1)
    if not votes[label]:
        return sys.maxsize
    return int((votes > votes[label]).sum() + (votes[:label] == votes[label]).sum())


def _accuracy(
    right: np.ndarray, images: str, criterion: str, top: int, confidence: float, *, binary: bool
) -> Accuracy:
    value, examples = float(right.mean()), len(right)
    if binary:
        interval, (low, high) = "clopper-pearson", clopper_pearson(int(right.sum()), examples, confidence)
    else:
        interval, (low, high) = "chernoff-hoeffding", bounded_mean(value, examples, confidence)
    return Accuracy(images, criterion, top, value, low, high, examples, interval, confidence)
