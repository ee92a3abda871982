"""Accuracies from rows against counting by hand, and paired comparisons."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from menet.errors import ConfigurationError, MenetError, RecordError
from menet.evaluation import Records, accuracies, accuracy, compare, restart_accuracies, score
from menet.evaluation.accuracy import correctness, vote_rank

HEADER = {
    "evaluation": {
        "label": "pgd",
        "start": 0,
        "stop": 40,
        "dataset": {"name": "digits", "split": "test", "classes": 10},
        "scoring": {"draws": 7, "restart_draws": 2},
    }
}


def scored(logits: torch.Tensor, labels: torch.Tensor) -> list[dict]:
    """Rows' descriptions from logits (draws, b, classes), through `score` with a model that replays them."""
    replies = iter(logits.unbind())
    images = torch.zeros(len(labels), 1, 2, 2)
    return score(lambda images: next(replies), images, labels, len(logits), max_batch=len(labels)).rows()


@pytest.fixture
def logits():
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (40,), generator=random)
    lean = torch.nn.functional.one_hot(labels, 10) * 2.0
    return [lean + torch.randn(7, 40, 10, generator=random) * scale for scale in (0.8, 1.5)], labels


@pytest.fixture
def records(logits):
    (clean, attacked), labels = logits
    rows = [
        {
            "index": index,
            "label": int(label),
            "clean": one,
            "adversarial": other,
            "restarts": [index % 3, index % 2],
        }
        for index, (label, one, other) in enumerate(
            zip(labels, scored(clean, labels), scored(attacked, labels), strict=True)
        )
    ]
    return Records(HEADER, tuple(rows))


def top(logits: torch.Tensor, labels: torch.Tensor, k: int) -> torch.Tensor:
    return (logits.topk(k, -1).indices == labels[:, None]).any(-1)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("images", ["clean", "adversarial"])
def test_every_criterion_is_what_its_words_say(records, logits, images, k):
    (clean, attacked), labels = logits
    right = top(clean if images == "clean" else attacked, labels, k)
    mean = top((clean if images == "clean" else attacked).double().mean(0), labels, k)
    expected = {
        "single": right[0].float().mean(),
        "expected": right.float().mean(),
        "worst": right.all(0).float().mean(),
        "mean": mean.float().mean(),
    }
    for criterion, value in expected.items():
        found = accuracy(records, images, criterion, k)
        assert found.value == pytest.approx(value.item())
        if criterion != "expected":
            exact = binomtest(round(40 * value.item()), 40).proportion_ci(0.95, method="exact")
            assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
            assert found.interval == "clopper-pearson"
        else:
            assert found.interval == "chernoff-hoeffding"


def test_one_draw_is_correct_or_not_whatever_the_criterion(records):
    """A deterministic model is scored on one: its expected accuracy is its vote, and so is the interval."""

    def first(scores: dict) -> dict:
        return scores | {name: scores[name][:1] for name in ("ranks", "predictions")}

    rows = tuple({**row, "adversarial": first(row["adversarial"])} for row in records.rows)
    single = Records(records.header, rows)
    found = {criterion: accuracy(single, criterion=criterion) for criterion in ("expected", "vote", "worst")}
    assert len({(one.value, one.low, one.high, one.interval) for one in found.values()}) == 1
    assert found["expected"].interval == "clopper-pearson"


def test_the_vote_is_the_one_of_the_defense(records, logits):
    (_, attacked), labels = logits
    votes = torch.nn.functional.one_hot(attacked.argmax(-1), 10).sum(0)
    assert accuracy(records, criterion="vote").value == pytest.approx((votes.argmax(-1) == labels).float().mean())
    assert vote_rank([3, 3, 1, 1, 2], 1) == 0
    assert vote_rank([3, 3, 1, 1, 2], 3) == 1
    assert vote_rank([3, 3, 1, 1, 2], 2) == 2
    assert vote_rank([3, 3], 0) > 1000


def test_classes_without_a_vote_are_ranked_by_the_mean_logits():
    def right(predictions: list[int], mean_rank: int, top: int) -> float:
        scores = {"predictions": predictions, "ranks": [mean_rank], "mean": {"rank": mean_rank}}
        return float(correctness([{"label": 0, "adversarial": scores}], criterion="vote", top=top)[0])

    assert [right([3], 2, top) for top in (1, 2, 3)] == [0, 0, 1]  # one draw: its own ranks
    assert [right([3, 4, 5], 1, top) for top in (1, 3, 4)] == [0, 0, 1]  # after the three that have votes
    assert [right([3, 4, 0], 2, top) for top in (1, 2, 3)] == [1, 1, 1]


def test_all_accuracies_stand_beside_those_of_clean_images(records):
    found = accuracies(records)
    kinds = {(one.images, one.criterion, one.top) for one in found}
    assert len(kinds) == len(found) == 5 * 2 * 2 + 2
    for images, criterion, k in kinds - {("restarts", "hard", 1), ("restarts", "expected", 1)}:
        assert ({"clean": "adversarial", "adversarial": "clean"}[images], criterion, k) in kinds
    for one in found:
        assert one.low <= one.value <= one.high


def test_the_hard_criterion_counts_an_example_fooled_by_any_restart(records):
    hard, expected = restart_accuracies(records)
    assert hard.value == np.mean([index % 3 == 0 and index % 2 == 0 for index in range(40)])
    assert expected.value == pytest.approx(1 - np.mean([(index % 3 + index % 2) / 4 for index in range(40)]))


def test_two_models_are_compared_on_the_examples_both_have(records):
    better = Records(HEADER, tuple({**row, "adversarial": row["clean"]} for row in records.rows[5:]))
    first, second = (correctness(part, "adversarial", "vote") for part in (records.rows[5:], better.rows))
    found = compare(records, better)
    only_first, only_second = int((first > second).sum()), int((second > first).sum())
    assert (found.examples, found.only_first, found.only_second) == (35, only_first, only_second)
    assert only_second > 0
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert found.p_value == pytest.approx(binomtest(only_first, only_first + only_second).pvalue)


def test_comparisons_that_would_mislead_are_refused(records):
    with pytest.raises(ConfigurationError, match="expected"):
        compare(records, records, criterion="expected")
    relabeled = Records(HEADER, tuple({**row, "label": (row["label"] + 1) % 10} for row in records.rows))
    with pytest.raises(RecordError, match=r"expected one label of example 0"):
        compare(records, relabeled)
    other = Records({"evaluation": {**HEADER["evaluation"], "dataset": {"name": "mnist", "split": "test"}}}, ())
    with pytest.raises(RecordError, match="expected one dataset, got 'digits' and 'mnist'"):
        compare(records, other)
    with pytest.raises(RecordError, match="examples in common"):
        compare(records, Records(HEADER, ()))


def described(records: Records, image: str = "", **changes: object) -> Records:
    """The records with another description of their evaluation, and another digest of each image."""
    evaluation = {
        **HEADER["evaluation"],
        "attack": {"kind": "PGD", "steps": 20, "eot": 10, "keep": "last", "loss": {"kind": "DLR"}},
        "threat": {"norm": "linf", "epsilon": 0.1},
        "gradient": "bpda",
        **changes,
    }
    return Records(
        {"evaluation": evaluation}, tuple({**row, "image": f"{image}{row['index']}"} for row in records.rows)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threat": {"norm": "linf", "epsilon": 0.2}}, "one threat model epsilon, got 0.1 and 0.2"),
        ({"attack": {"kind": "PGD", "steps": 40}}, "one attack steps, got 20 and 40"),
        ({"attack": {"kind": "PGD", "steps": 20, "loss": {"kind": "Margin"}}}, "one attack loss kind"),
        ({"gradient": "exact"}, "one gradient, got 'bpda' and 'exact'"),
        ({"scoring": {"draws": 9, "restart_draws": 2}}, "one number of scoring draws, got 7 and 9"),
        ({"bfloat16": True}, "one precision of the attack, got 'float32' and 'bfloat16'"),
        ({"image": "another "}, "one image of example 0"),
        ({"threat": {"norm": "linf", "epsilon": 8 / 255}}, "one threat model epsilon, got 0.1 and 8/255"),
    ],
)  # fmt: skip
def test_what_differs_is_named(records, changes, words):
    with pytest.raises(RecordError, match=words):
        compare(described(records), described(records, **changes))


def test_classes_that_differ_are_named(records):
    first, second = (
        described(records, dataset={**HEADER["evaluation"]["dataset"], "class_names": names})
        for names in (["cat", "dog", "owl"], ["cat", "owl"])
    )
    with pytest.raises(RecordError, match="expected one list of classes, got dog and none of these"):
        compare(first, second)


def test_what_follows_the_model_may_differ(records):
    """A deterministic model is scored on one draw and attacked without EOT, with no preprocessing to pass."""
    attack = {"kind": "PGD", "steps": 20, "eot": 1, "keep": "best", "loss": {"kind": "DLR"}}
    alone = described(records, attack=attack, scoring={"draws": 1, "restart_draws": 2}, gradient=None)
    assert compare(described(records), alone).examples == 40


def test_one_draw_of_a_random_defense_is_not_compared_with_many(records):
    model = {"defense": {"name": "me-net", "p": 0.5}}
    one = described(records, model=model, scoring={"draws": 1, "restart_draws": 2})
    with pytest.raises(RecordError, match="one number of scoring draws, got 7 and 1"):
        compare(described(records, model=model), one)


def test_a_tie_for_the_first_place_is_not_correct_unless_predicted():
    (row,) = scored(torch.zeros(1, 1, 10), torch.tensor([4]))
    assert (row["ranks"][0] == 0) == (row["predictions"][0] == 4)


def test_logits_that_are_not_numbers_stop_an_evaluation():
    logits = torch.zeros(1, 3, 10)
    logits[0, 2, 5] = torch.nan
    with pytest.raises(MenetError, match=r"NaN logits for image 2"):
        scored(logits, torch.tensor([1, 2, 3]))
