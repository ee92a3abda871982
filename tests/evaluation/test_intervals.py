"""Intervals and McNemar against scipy, and coverage where there is no oracle."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from menet.errors import ConfigurationError
from menet.evaluation import bounded_mean, clopper_pearson, mcnemar
from menet.evaluation.accuracy import lower_bound, upper_bound

counts = st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts, st.floats(0.5, 0.9999))
def test_clopper_pearson_is_scipys_exact_interval(count, confidence):
    expected = binomtest(*count).proportion_ci(confidence, method="exact")
    np.testing.assert_allclose(clopper_pearson(*count, confidence), (expected.low, expected.high), atol=1e-9)


@given(counts, st.floats(1e-6, 0.4))
def test_one_sided_bounds_are_scipys(count, alpha):
    above = binomtest(*count, alternative="greater").proportion_ci(1 - alpha, method="exact")
    below = binomtest(*count, alternative="less").proportion_ci(1 - alpha, method="exact")
    assert lower_bound(*count, alpha) == pytest.approx(above.low, abs=1e-9)
    assert upper_bound(*count, alpha) == pytest.approx(below.high, abs=1e-9)


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_scipys_exact_test_of_a_fair_coin(first, second):
    if first + second == 0:
        assert mcnemar(0, 0) == 1
    else:
        assert mcnemar(first, second) == pytest.approx(binomtest(first, first + second).pvalue, rel=1e-9)


@given(st.floats(0, 1), st.integers(1, 100_000), st.floats(0.5, 0.999))
def test_bounded_mean_contains_the_mean_and_is_within_hoeffdings_interval(mean, examples, confidence):
    low, high = bounded_mean(mean, examples, confidence)
    radius = math.sqrt(math.log(2 / (1 - confidence)) / (2 * examples))
    assert 0 <= low <= mean <= high <= 1
    assert low >= mean - radius - 1e-9
    assert high <= mean + radius + 1e-9


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounded_mean_contains_clopper_pearson_where_both_apply(count):
    exact, ours = clopper_pearson(*count), bounded_mean(count[0] / count[1], count[1])
    assert ours.low <= exact.low + 1e-9
    assert ours.high >= exact.high - 1e-9


@pytest.mark.parametrize("shape", [(0.2, 0.1), (5, 1), (1, 1)])
def test_bounded_mean_has_its_nominal_coverage_of_fractions(shape):
    random = np.random.default_rng(0)
    draws = random.beta(*shape, size=(300, 30)).mean(1)
    truth = shape[0] / sum(shape)
    covered = [low <= truth <= high for low, high in (bounded_mean(float(mean), 30) for mean in draws)]
    assert np.mean(covered) >= 0.95


@pytest.mark.parametrize("wrong", [(-1, 5), (6, 5), (0, 0)])
def test_counts_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=f"got {wrong[0]} of {wrong[1]}"):
        clopper_pearson(*wrong)
    with pytest.raises(ConfigurationError, match=r"confidence < 1, got 1\.0"):
        clopper_pearson(1, 2, 1.0)
    with pytest.raises(ConfigurationError, match="mean <= 1, got nan"):
        bounded_mean(math.nan, 5)
