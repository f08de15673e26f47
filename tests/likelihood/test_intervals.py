"""Intervals and variance components against simulation, enumeration and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from diffusionbert.likelihood.intervals import (
    Difference,
    degrees_of_freedom,
    paired_difference,
    percentile_interval,
    ratio_intervals,
    resampled_sums,
    spread,
    student_p_value,
    student_quantile,
    with_seeds,
)


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_variance_components_of_a_worked_example():
    """Rate (3 + 9) / (2 + 4) = 2, residuals -1 and 1: total 2/6² · 2/1, draws (0.5 + 1.3)/6²."""
    found = spread(numbers(3, 9), numbers(2, 4), numbers(0.5, 1.3))
    assert found.draws == pytest.approx(1.8 / 36)
    assert found.sentences == pytest.approx(4 / 36 - 1.8 / 36)
    assert found.total == pytest.approx(4 / 36)


def test_variance_components_are_unbiased_even_for_a_few_sentences():
    """4000 corpora of 5 sentences of 4 tokens: standard deviation 3 over sentences, 2 over each of 3 rounds."""
    rng = np.random.default_rng(0)
    rounds = rng.normal(10, 3, (4000, 5, 1)) + rng.normal(0, 2, (4000, 5, 3))
    parts = [spread(corpus.mean(axis=1), np.full(5, 4.0), corpus.var(axis=1, ddof=1) / 3) for corpus in rounds]
    assert np.mean([part.draws for part in parts]) == pytest.approx(2**2 / 3 / 5 / 4**2, rel=0.03)
    assert np.mean([part.sentences for part in parts]) == pytest.approx(3**2 / 5 / 4**2, rel=0.04)
    assert np.var(rounds.mean(axis=(1, 2)) / 4) == pytest.approx(np.mean([part.total for part in parts]), rel=0.05)


def test_variance_components_of_one_sentence_and_of_infinite_nats():
    alone = spread(numbers(3), numbers(2), numbers(0.4))
    assert math.isnan(alone.sentences)
    assert alone.draws == pytest.approx(0.1)
    assert spread(numbers(3, math.inf), numbers(2, 2), numbers(0.4, math.inf)).total == math.inf
    assert spread(numbers(4, 4), numbers(2, 2), numbers(1, 1)).sentences == 0  # never negative


@pytest.mark.parametrize("degrees", [1.0, 2.0, 3.0, 7.5, 30.0, 300.0, 1e5])
def test_student_quantiles_match_scipy(degrees):
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


def test_student_quantile_at_infinity_and_below_one_degree():
    assert student_quantile(math.inf) == pytest.approx(1.959964, abs=1e-4)
    with pytest.raises(ValueError, match=r"must be >= 1, got 0\.5; draw at least twice"):
        student_quantile(0.5)


def test_degrees_of_freedom():
    assert degrees_of_freedom(numbers(2.0), rounds=5) == 4
    assert degrees_of_freedom(numbers(2, 2, 2), rounds=5) == pytest.approx(12)
    assert degrees_of_freedom(numbers(2, 0, 0), rounds=5) == pytest.approx(4)  # only one sentence contributes
    assert degrees_of_freedom(numbers(0, 0), rounds=5) == math.inf
    assert degrees_of_freedom(numbers(0, 0), rounds=1) == math.inf


def test_all_resamples_are_equally_likely():
    """Three sentences have 27 resamples; the sums follow the enumerated distribution."""
    values = numbers(1, 10, 100)
    sums, counts = resampled_sums([values, np.ones(3)], seed=0, resamples=27_000)
    assert set(counts) == {3.0}
    expected = [sum(choice) for choice in itertools.product(values, repeat=3)]
    kinds, frequencies = np.unique(expected, return_counts=True)
    observed = [int((sums == kind).sum()) for kind in kinds]
    assert sum(observed) == 27_000
    assert stats.chisquare(observed, frequencies * 1000).pvalue > 0.01


def test_chunks_of_resamples_do_not_repeat():
    sums = resampled_sums([np.arange(2**19, dtype=np.float64)], seed=0, resamples=7)[0]
    assert len(set(sums)) == 7
    assert np.abs(sums / (2**19 * (2**19 - 1) / 2) - 1).max() < 0.01


def test_a_resample_with_an_infinite_sentence_is_infinite():
    sums = resampled_sums([numbers(1, math.inf)], seed=0, resamples=4000)[0]
    assert np.isinf(sums).mean() == pytest.approx(0.75, abs=0.03)
    assert set(sums[np.isfinite(sums)]) == {2.0}


def test_the_same_seed_gives_the_same_resamples():
    first, again, other = (resampled_sums([np.arange(50.0)], seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_percentile_interval_excludes_2_5_percent_on_each_side():
    low, high = percentile_interval(np.random.default_rng(0).permutation(np.arange(2001.0)))
    assert (low, high) == (50.0, 1950.0)
    assert percentile_interval(numbers(*[1.0] * 100, math.inf, math.inf, math.inf)) == (1.0, math.inf)


def test_ratio_intervals_agree_with_the_standard_error_of_a_ratio():
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 40, 400).astype(np.float64)
    nats = 3 * tokens + rng.normal(0, 4, 400) * np.sqrt(tokens)
    (low, high), (doubled_low, _) = ratio_intervals(nats, [tokens, tokens / 2], seed=0)
    error = math.sqrt(spread(nats, tokens, np.zeros(400)).total)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.06)
    assert doubled_low == pytest.approx(2 * low)
    assert low < nats.sum() / tokens.sum() < high
    # That long sentences have more nats does not contribute to the variance of the rate.
    assert error < 0.6 * nats.std() / math.sqrt(400) / tokens.mean()
    with pytest.raises(ValueError, match="needs at least two of them, got 1"):
        ratio_intervals(nats[:1], [tokens[:1]], seed=0)


def two_systems(rng: np.random.Generator, shift: float) -> tuple[tuple, tuple]:
    """Nats and tokens of two systems; a sentence is hard or easy for both, so only a paired test separates them."""
    tokens = rng.integers(5, 40, 60).astype(np.float64)
    difficulty = tokens * rng.normal(3, 1, 60)
    nats = tuple(difficulty + rng.normal(0, 1, 60) + extra * tokens for extra in (shift, 0.0))
    return nats, (tokens, tokens)


def test_p_values_are_uniform_under_the_null_hypothesis():
    rng = np.random.default_rng(0)
    found = [paired_difference(*two_systems(rng, 0.0), resamples=500) for _ in range(400)]
    assert stats.kstest([difference.p_value for difference in found], "uniform").pvalue > 0.01
    covered = np.mean([difference.low <= 0 <= difference.high for difference in found])
    assert 0.91 <= covered <= 0.975


def test_a_true_difference_has_a_small_p_value_and_an_interval_of_its_sign():
    for shift in (0.05, -0.05):
        found = paired_difference(*two_systems(np.random.default_rng(0), shift))
        assert found.p_value < 0.001
        assert found.value == pytest.approx(shift, abs=0.02)
        assert found.low < found.value < found.high
        assert math.copysign(1, found.low) == math.copysign(1, found.high) == math.copysign(1, shift)


def test_each_system_is_normalized_by_its_own_counts():
    (nats, _), (tokens, _) = two_systems(np.random.default_rng(0), 0.0)
    found = paired_difference((nats, nats), (tokens, tokens / 2))
    assert found.low < found.value < found.high < 0
    assert found.value == pytest.approx(-nats.sum() / tokens.sum())


def test_the_difference_of_a_system_from_itself_is_zero():
    nats, tokens = two_systems(np.random.default_rng(0), 0.0)
    found = paired_difference((nats[0], nats[0]), tokens)
    assert (found.value, found.low, found.high, found.p_value) == (0, 0, 0, 1)


@pytest.mark.parametrize("degrees", [1.0, 2.5, 30.0, 1e7])
@pytest.mark.parametrize("t", [0.0, 0.5, -2.0, 9.0])
def test_p_values_of_student_equal_scipys(degrees, t):
    assert student_p_value(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), abs=1e-5)


def test_seeds_add_their_variance_to_a_difference():
    """Welch's interval, where sentences contribute nothing."""
    first, second = np.array([1.0, 1.2, 1.1]), np.array([1.5, 1.7, 1.4, 1.6])
    value = float(first.mean() - second.mean())
    found = with_seeds(Difference(value, value, value, 0.001), first, second)
    expected = stats.ttest_ind(first, second, equal_var=False)
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-5)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-4)
    certain = with_seeds(Difference(-0.5, -0.6, -0.4, 0.001), np.ones(2), np.full(2, 1.5))
    assert (certain.low, certain.high) == pytest.approx((-0.6, -0.4), abs=1e-5)  # seeds contribute nothing
