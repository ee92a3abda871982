"""Two models on the same examples."""

from dataclasses import dataclass

from scipy.stats import binom

from menet.errors import ConfigurationError, RecordError
from menet.evaluation.accuracy import Criterion, Images, correctness
from menet.evaluation.records import Records


@dataclass(frozen=True)
class Comparison:
    """A paired comparison: on how many examples only one of two models is right, and how likely by chance."""

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

    Where the models are equally good, an example on which just one is right is as likely to be either's.
    """
    if only_first < 0 or only_second < 0:
        raise ConfigurationError(f"counts are {only_first} and {only_second}; both must be 0 or more")
    both = only_first + only_second
    return min(1.0, 2 * float(binom.cdf(min(only_first, only_second), both, 0.5)))


def compare(
    first: Records,
    second: Records,
    images: Images = "adversarial",
    criterion: Criterion = "vote",
    top: int = 1,
) -> Comparison:
    """Compare two models on the examples that both have rows of; the same dataset is required.

    `expected` gives shares, not yes or no, so it cannot be compared this way; `single` is its unbiased stand-in.
    """
    if criterion == "expected":
        raise ConfigurationError("criterion is 'expected'; accepted are single, vote, mean and worst")
    for name in ("name", "split"):
        one, other = (records.evaluation["dataset"][name] for records in (first, second))
        if one != other:
            raise RecordError(f"the records are of different datasets: {name} is {one!r} and {other!r}")
    rows = {row["index"]: row for row in second.rows}
    pairs = [(row, rows[row["index"]]) for row in first.rows if row["index"] in rows]
    if not pairs:
        raise RecordError("the records have no example in common")
    for one, other in pairs:
        if one["label"] != other["label"]:
            raise RecordError(f"example {one['index']} has label {one['label']} here and {other['label']} there")
    right = [correctness(side, images, criterion, top) > 0 for side in zip(*pairs, strict=True)]
    only_first, only_second = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    return Comparison(len(pairs), only_first, only_second, mcnemar(only_first, only_second))
