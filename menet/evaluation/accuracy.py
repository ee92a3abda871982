"""Accuracies from rows, each with an interval over the examples, and paired comparisons of two models.

The intervals hold for any number of examples, without approximation.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, betainccinv, betaincinv

from menet.errors import ConfigurationError, RecordError
from menet.evaluation.records import Records, Row

CONFIDENCE = 0.95
NORMAL = 1.96
"""Standard deviations on either side in a normal interval of that confidence."""

Criterion = Literal["single", "expected", "vote", "mean", "worst"]
Images = Literal["clean", "adversarial"]

CRITERIA: dict[Criterion, str] = {
    "single": "single draw",
    "expected": "expected over draws",
    "vote": "majority vote over draws",
    "mean": "mean logits over draws",
    "worst": "worst case over draws",
}


@dataclass(frozen=True)
class Accuracy:
    """An accuracy with its confidence interval."""

    images: str
    """clean or adversarial; restarts for the criteria over restarts."""
    criterion: str
    top: int
    value: float
    low: float
    high: float
    examples: int
    interval: str
    """clopper-pearson (correct or not per example) or chernoff-hoeffding (a fraction per example)."""
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
    # One draw is correct or not, as for every deterministic model; the mean over several is a fraction.
    binary = criterion != "expected" or all(len(row[images]["ranks"]) == 1 for row in records.rows)
    return _accuracy(right, images, criterion, top, confidence, binary=binary)


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
    """Accuracies over the restarts of an attack, each image scored on fresh draws.

    `hard`: correct for every restart (under each draw it was scored on), the paper's criterion; `expected`: the
    mean over restarts and draws.
    """
    draws = records.evaluation["scoring"]["restart_draws"]
    if not records.rows or not all("restarts" in row for row in records.rows):
        raise RecordError(f"expected restarts in every row of {records.label!r}; attack with restarts=2 or more")
    fooled = np.array([row["restarts"] for row in records.rows], float) / draws
    return [
        _accuracy((fooled == 0).all(1).astype(float), "restarts", "hard", 1, confidence, binary=True),
        _accuracy(1 - fooled.mean(1), "restarts", "expected", 1, confidence, binary=False),
    ]


def correctness(
    rows: Sequence[Row], images: Images = "adversarial", criterion: Criterion = "expected", top: int = 1
) -> np.ndarray:
    """Whether each row is correct, 0 or 1; for `expected` the fraction of draws that are."""
    if not rows:
        raise RecordError("expected at least one row to compute an accuracy from, got none")
    if top < 1:
        raise ConfigurationError(f"expected top >= 1, got {top}")
    if images not in get_args(Images):
        raise ConfigurationError(f"unknown images {images!r}; choose from {', '.join(get_args(Images))}")
    if criterion == "mean":
        return np.array([row[images]["mean"]["rank"] < top for row in rows], float)
    if criterion == "vote":
        return np.array([_rank_by_votes(row[images], row["label"]) < top for row in rows], float)
    right = np.array([row[images]["ranks"] for row in rows]) < top
    if criterion == "single":
        return right[:, 0].astype(float)
    if criterion == "expected":
        return right.mean(1)
    if criterion == "worst":
        return right.all(1).astype(float)
    raise ConfigurationError(f"unknown criterion {criterion!r}; choose from {', '.join(get_args(Criterion))}")


def vote_rank(predictions: Sequence[int], label: int) -> int:
    """How many classes have more votes than `label`, or as many and a lower number, as `MENet.vote` decides.

    A class without a vote has no rank.
    """
    votes = np.bincount(predictions, minlength=label + 1)
    if not votes[label]:
        return sys.maxsize
    return int((votes > votes[label]).sum() + (votes[:label] == votes[label]).sum())


def _rank_by_votes(scores: Mapping[str, Any], label: int) -> int:
    """The rank of `label` by votes; classes without one come after the others, in the order of mean logits."""
    rank = vote_rank(scores["predictions"], label)
    return rank if rank < sys.maxsize else max(len(set(scores["predictions"])), scores["mean"]["rank"])


@dataclass(frozen=True)
class Comparison:
    """A paired comparison: on how many examples only one of two models is correct, and how likely by chance."""

    examples: int
    only_first: int
    only_second: int
    p_value: float
    """Of the exact McNemar test, two-sided: small when the models differ."""

    @property
    def difference(self) -> float:
        """The first model's accuracy minus the second's."""
        return (self.only_first - self.only_second) / self.examples


def mcnemar(only_first: int, only_second: int) -> float:
    """The p-value of the exact two-sided McNemar test.

    If both models are equally good, an example that only one gets right is equally likely to be either's.
    """
    if only_first < 0 or only_second < 0:
        raise ConfigurationError(f"expected counts >= 0, got {only_first} and {only_second}")
    both = only_first + only_second
    return min(1.0, 2 * float(bdtr(min(only_first, only_second), both, 0.5)))


def compare(
    first: Records,
    second: Records,
    images: Images = "adversarial",
    criterion: Criterion = "vote",
    top: int = 1,
) -> Comparison:
    """Compare two models on the examples of one dataset that both have rows of, under one attack.

    Records that differ in what must be equal are refused (`incomparable`). `expected` gives fractions, which
    McNemar's test does not apply to; use `single`, its unbiased estimate.
    """
    if criterion == "expected":
        raise ConfigurationError("cannot compare by criterion 'expected'; choose from single, vote, mean, worst")
    difference = incomparable(first, second)
    if difference is not None:
        raise RecordError(f"cannot compare {first.label!r} of two models: {difference}")
    pairs = _shared(first, second)
    correct = [correctness(side, images, criterion, top) > 0 for side in zip(*pairs, strict=True)]
    only_first, only_second = int((correct[0] & ~correct[1]).sum()), int((correct[1] & ~correct[0]).sum())
    return Comparison(len(pairs), only_first, only_second, mcnemar(only_first, only_second))


class Difference(NamedTuple):
    """How much more of the same examples the second of two models gets right, and half of its 95 % interval."""

    value: float
    margin: float
    examples: int


def paired_difference(first: Records, second: Records, images: Images = "adversarial") -> Difference:
    """What the second model has over the first in expected accuracy, on the examples that both have rows of.

    The attacks may differ: each model stands under its own. The interval is normal, over examples.
    """
    for name in ("name", "split"):
        if found := _different(name, first.evaluation["dataset"][name], second.evaluation["dataset"][name]):
            raise RecordError(f"cannot compare {first.label!r} and {second.label!r}: {found}")
    pairs = _shared(first, second)
    if len(pairs) < 2:
        raise RecordError(f"expected at least 2 examples in common, got {len(pairs)}")
    one, other = (correctness(side, images, "expected") for side in zip(*pairs, strict=True))
    margin = NORMAL * float(np.std(other - one, ddof=1)) / math.sqrt(len(pairs))
    return Difference(float(np.mean(other - one)), margin, len(pairs))


class Interval(NamedTuple):
    low: float
    high: float


def incomparable(first: Records, second: Records) -> str | None:
    """Why a comparison of two models would mislead, in words; None where it would not.

    Dataset, classes, the images and labels of shared examples, attack and its precision, threat model, gradient
    and scoring must be equal. What follows the model may differ: draws of a random one against one pass of a
    deterministic one.
    """
    one, other = first.evaluation, second.evaluation
    for name, field in (
        ("dataset", "name"),
        ("split", "split"),
        ("list of classes", "class_names"),
        ("shape", "shape"),
    ):
        found = _different(name, one["dataset"].get(field), other["dataset"].get(field))
        if found:
            return found
    pairs = _shared(first, second)
    if not pairs:
        return "expected examples in common, got none"
    for mine, theirs in pairs:
        for name, field in (("label", "label"), ("image", "image")):
            found = _different(f"{name} of example {mine['index']}", mine.get(field), theirs.get(field))
            if found:
                return found
    own = ("classifier", "reconstruct", *(["source"] if "on=classifier" in first.label else []))
    attacks = [_without(records.get("attack"), own) for records in (one, other)]
    draws = [int(records["scoring"]["draws"]) for records in (one, other)]
    precisions = ["bfloat16" if records.get("bfloat16") else "float32" for records in (one, other)]
    defenses = [records.get("model", {}).get("defense") for records in (one, other)]
    same_defense = defenses[0] is not None and defenses[0] == defenses[1]
    if draws == [1, 1] or (1 in draws and not same_defense):
        # One of them is deterministic, and settings that follow the model are those of a deterministic one.
        attacks = [_without(attack, ("eot", "keep", "draws", "threshold", "loss")) for attack in attacks]
        draws, precisions = [1, 1], []
    return (
        _different("threat model", one.get("threat"), other.get("threat"))
        or _different("attack", *attacks)
        or _different("gradient", one.get("gradient"), other.get("gradient"))
        or _different("fixed draws", one.get("fixed_draws"), other.get("fixed_draws"))
        or _different("number of scoring draws", *draws)
        or (_different("precision of the attack", *precisions) if precisions else None)
    )


def _shared(first: Records, second: Records) -> list[tuple[Row, Row]]:
    """The rows of the examples that both have."""
    rows = {row["index"]: row for row in second.rows}
    return [(row, rows[row["index"]]) for row in first.rows if row["index"] in rows]


def _different(name: str, one: Any, other: Any) -> str | None:
    """In words, the first place in which two values differ; None where they agree or one is not known."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        parts = (_different(f"{name} {key}", one.get(key), other.get(key)) for key in one)
        return next(filter(None, parts), None)
    if one is None or other is None or one == other:
        return None
    if isinstance(one, list) and isinstance(other, list):
        one, other = (
            [value for value in values if value not in rest] for values, rest in ((one, other), (other, one))
        )
    return f"expected one {name}, got {_shown(one)} and {_shown(other)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:5])) + (", …" if len(value) > 5 else "") if value else "none of these"
    over = round(255 * value) if isinstance(value, float) and math.isfinite(value) else 0
    if 0 < over <= 16 and abs(over / 255 - value) < 1e-9:
        return f"{over}/255"
    return f"{value!r:.60}"


def _without(value: Any, names: Sequence[str]) -> Any:
    """A description without the fields `names`, however deep."""
    if isinstance(value, Mapping):
        return {key: _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def clopper_pearson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact interval for a probability from `successes` of `trials` independent yes-or-no outcomes."""
    _check(successes, trials, confidence)
    tail = (1 - confidence) / 2
    return Interval(lower_bound(successes, trials, tail), upper_bound(successes, trials, tail))


def lower_bound(successes: int, trials: int, alpha: float) -> float:
    """The Clopper–Pearson lower bound: above the true probability with probability at most `alpha`."""
    _check(successes, trials, 1 - alpha)
    return 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, alpha))


def upper_bound(successes: int, trials: int, alpha: float) -> float:
    """The Clopper–Pearson upper bound: below the true probability with probability at most `alpha`."""
    _check(successes, trials, 1 - alpha)
    return 1.0 if successes == trials else float(betainccinv(successes + 1, trials - successes, alpha))


def bounded_mean(mean: float, examples: int, confidence: float = CONFIDENCE) -> Interval:
    """An interval for the mean of independent values in [0, 1] of any distribution.

    Clopper–Pearson is for yes-or-no outcomes only; the fraction of draws that classify an example correctly is
    not one. This one inverts the Chernoff–Hoeffding bound P ≤ exp(−n·kl(mean, μ)) (Hoeffding 1963, theorem 1):
    it always holds, is never wider than Hoeffding's usual interval, and about 1.4 times as wide as
    Clopper–Pearson where both apply.
    """
    if not 0 <= mean <= 1:
        raise ConfigurationError(f"expected 0 <= mean <= 1, got {mean}")
    _check(0, examples, confidence)
    budget = math.log(2 / (1 - confidence)) / examples

    def excess(at: float) -> float:
        return _relative_entropy(mean, at) - budget

    return Interval(
        0.0 if mean == 0 else _root(excess, 0.0, mean),
        1.0 if mean == 1 else _root(excess, 1.0, mean),
    )


def _accuracy(
    right: np.ndarray, images: str, criterion: str, top: int, confidence: float, *, binary: bool
) -> Accuracy:
    value, examples = float(right.mean()), len(right)
    if binary:
        interval, (low, high) = "clopper-pearson", clopper_pearson(int(right.sum()), examples, confidence)
    else:
        interval, (low, high) = "chernoff-hoeffding", bounded_mean(value, examples, confidence)
    return Accuracy(images, criterion, top, value, low, high, examples, interval, confidence)


def _root(excess: Callable[[float], float], end: float, mean: float) -> float:
    # At the end itself the entropy is infinite; the nearest number to it is as good.
    edge = math.nextafter(end, mean)
    return end if excess(edge) <= 0 else float(brentq(excess, edge, mean, xtol=1e-12))


def _relative_entropy(p: float, q: float) -> float:
    first = p * math.log(p / q) if p > 0 else 0.0
    second = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return first + second


def _check(successes: int, trials: int, confidence: float) -> None:
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigurationError(
            f"expected 0 <= successes <= trials and trials >= 1, got {successes} of {trials}"
        )
    if not 0 < confidence < 1:
        raise ConfigurationError(f"expected 0 < confidence < 1, got {confidence}")
