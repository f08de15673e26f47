"""Intervals and variances against simulation, enumeration and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from diffusionbert.likelihood.intervals import (
    degrees_of_freedom,
    paired_difference,
    percentile_interval,
    ratio_intervals,
    resampled_sums,
    spread,
    student_quantile,
)


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_the_parts_of_the_variance_by_hand():
    """Rate (3 + 9) / (2 + 4) = 2, residuals -1 and 1: total 2/6² · 2/1, draws (0.5 + 1.3)/6²."""
    found = spread(numbers(3, 9), numbers(2, 4), numbers(0.5, 1.3))
    assert found.draws == pytest.approx(1.8 / 36)
    assert found.sentences == pytest.approx(4 / 36 - 1.8 / 36)
    assert found.total == pytest.approx(4 / 36)


def test_the_parts_of_the_variance_are_unbiased_even_for_a_few_sentences():
    """4000 corpora of 5 sentences of 4 tokens whose means scatter by 3, each of 3 rounds that scatter by 2."""
    chance = np.random.default_rng(0)
    rounds = chance.normal(10, 3, (4000, 5, 1)) + chance.normal(0, 2, (4000, 5, 3))
    parts = [spread(corpus.mean(axis=1), np.full(5, 4.0), corpus.var(axis=1, ddof=1) / 3) for corpus in rounds]
    assert np.mean([part.draws for part in parts]) == pytest.approx(2**2 / 3 / 5 / 4**2, rel=0.03)
    assert np.mean([part.sentences for part in parts]) == pytest.approx(3**2 / 5 / 4**2, rel=0.04)
    assert np.var(rounds.mean(axis=(1, 2)) / 4) == pytest.approx(np.mean([part.total for part in parts]), rel=0.05)


def test_one_sentence_says_nothing_about_sentences_and_an_infinite_one_nothing_at_all():
    alone = spread(numbers(3), numbers(2), numbers(0.4))
    assert math.isnan(alone.sentences)
    assert alone.draws == pytest.approx(0.1)
    assert spread(numbers(3, math.inf), numbers(2, 2), numbers(0.4, math.inf)).total == math.inf
    assert spread(numbers(4, 4), numbers(2, 2), numbers(1, 1)).sentences == 0  # never below


@pytest.mark.parametrize("degrees", [1.0, 2.0, 3.0, 7.5, 30.0, 300.0, 1e5])
def test_quantiles_of_student(degrees):
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


def test_student_at_both_ends():
    assert student_quantile(math.inf) == pytest.approx(1.959964, abs=1e-4)
    with pytest.raises(ValueError, match="at least twice"):
        student_quantile(0.5)


def test_degrees_of_freedom():
    assert degrees_of_freedom(numbers(2.0), rounds=5) == 4
    assert degrees_of_freedom(numbers(2, 2, 2), rounds=5) == pytest.approx(12)
    assert degrees_of_freedom(numbers(2, 0, 0), rounds=5) == pytest.approx(4)  # one sentence alone decides
    assert degrees_of_freedom(numbers(0, 0), rounds=5) == math.inf
    assert degrees_of_freedom(numbers(0, 0), rounds=1) == math.inf


def test_resamples_are_all_choices_alike():
    """Of three sentences there are 27 choices; sums over them have their enumerated distribution."""
    values = numbers(1, 10, 100)
    sums, counts = resampled_sums([values, np.ones(3)], seed=0, resamples=27_000)
    assert set(counts) == {3.0}
    expected = [sum(choice) for choice in itertools.product(values, repeat=3)]
    kinds, frequencies = np.unique(expected, return_counts=True)
    observed = [int((sums == kind).sum()) for kind in kinds]
    assert sum(observed) == 27_000
    assert stats.chisquare(observed, frequencies * 1000).pvalue > 0.01


def test_many_sentences_are_resampled_in_parts_that_go_on_and_do_not_repeat():
    sums = resampled_sums([np.arange(2**19, dtype=np.float64)], seed=0, resamples=7)[0]
    assert len(set(sums)) == 7
    assert np.abs(sums / (2**19 * (2**19 - 1) / 2) - 1).max() < 0.01


def test_infinite_sentences_stay_infinite_where_they_are_chosen():
    sums = resampled_sums([numbers(1, math.inf)], seed=0, resamples=4000)[0]
    assert np.isinf(sums).mean() == pytest.approx(0.75, abs=0.03)
    assert set(sums[np.isfinite(sums)]) == {2.0}


def test_the_same_seed_gives_the_same_resamples_and_another_others():
    first, again, other = (resampled_sums([np.arange(50.0)], seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_percentile_interval_leaves_out_a_fortieth_on_either_side():
    low, high = percentile_interval(np.random.default_rng(0).permutation(np.arange(2001.0)))
    assert (low, high) == (50.0, 1950.0)
    assert percentile_interval(numbers(*[1.0] * 100, math.inf, math.inf, math.inf)) == (1.0, math.inf)


def test_intervals_of_ratios_agree_with_the_standard_error_of_a_ratio():
    chance = np.random.default_rng(1)
    tokens = chance.integers(5, 40, 400).astype(np.float64)
    nats = 3 * tokens + chance.normal(0, 4, 400) * np.sqrt(tokens)
    (low, high), (doubled_low, _) = ratio_intervals(nats, [tokens, tokens / 2], seed=0)
    error = math.sqrt(spread(nats, tokens, np.zeros(400)).total)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.06)
    assert doubled_low == pytest.approx(2 * low)
    assert low < nats.sum() / tokens.sum() < high
    # Long sentences cost more, which is no variance of a rate.
    assert error < 0.6 * nats.std() / math.sqrt(400) / tokens.mean()
    with pytest.raises(ValueError, match="at least two"):
        ratio_intervals(nats[:1], [tokens[:1]], seed=0)


def two_systems(chance: np.random.Generator, shift: float) -> tuple[tuple, tuple]:
    """Sentences are hard or easy for both systems, so only pairs of them tell the systems apart."""
    tokens = chance.integers(5, 40, 60).astype(np.float64)
    hardness = tokens * chance.normal(3, 1, 60)
    nats = tuple(hardness + chance.normal(0, 1, 60) + extra * tokens for extra in (shift, 0.0))
    return nats, (tokens, tokens)


def test_p_values_are_uniform_when_there_is_no_difference():
    chance = np.random.default_rng(0)
    found = [paired_difference(*two_systems(chance, 0.0), resamples=500) for _ in range(400)]
    assert stats.kstest([difference.p_value for difference in found], "uniform").pvalue > 0.01
    covered = np.mean([difference.low <= 0 <= difference.high for difference in found])
    assert 0.91 <= covered <= 0.975


def test_p_values_are_small_when_there_is_one_and_the_interval_tells_its_sign():
    for shift in (0.05, -0.05):
        found = paired_difference(*two_systems(np.random.default_rng(0), shift))
        assert found.p_value < 0.001
        assert found.value == pytest.approx(shift, abs=0.02)
        assert found.low < found.value < found.high
        assert math.copysign(1, found.low) == math.copysign(1, found.high) == math.copysign(1, shift)


def test_each_system_is_divided_by_its_own_counts():
    (nats, _), (tokens, _) = two_systems(np.random.default_rng(0), 0.0)
    found = paired_difference((nats, nats), (tokens, tokens / 2))
    assert found.low < found.value < found.high < 0
    assert found.value == pytest.approx(-nats.sum() / tokens.sum())


def test_a_system_does_not_differ_from_itself():
    nats, tokens = two_systems(np.random.default_rng(0), 0.0)
    found = paired_difference((nats[0], nats[0]), tokens)
    assert (found.value, found.low, found.high, found.p_value) == (0, 0, 0, 1)
