"""The plan of batches: complete, reproducible, and with little padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from diffusionbert.batches import BatchPlan, FixedRows, Position, TokenBudget, parts

# Lengths like those of real sentences: mostly 10 to 40 tokens, a few long ones.
LENGTHS = np.random.default_rng(0).lognormal(3.2, 0.5, 30_000).astype(np.int64).clip(3, 128)


@pytest.mark.parametrize("batching", [TokenBudget(4096), FixedRows(32)], ids=str)
def test_every_sentence_appears_once_an_epoch(batching):
    batches = BatchPlan(LENGTHS, batching, seed=0).epoch(0)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(LENGTHS)))


def test_a_token_budget_is_kept_and_used():
    batches = BatchPlan(LENGTHS, TokenBudget(4096), seed=0).epoch(0)
    places = [len(batch) * LENGTHS[batch].max() for batch in batches]
    assert max(places) <= 4096
    assert np.mean(places) > 0.95 * 4096


def test_padding_stays_under_ten_percent():
    assert BatchPlan(LENGTHS, TokenBudget(4096), seed=0).padding() < 0.1
    assert BatchPlan(LENGTHS, FixedRows(32), seed=0).padding() < 0.1


def test_fixed_rows_are_fixed_but_for_the_ends_of_pools():
    sizes = [len(batch) for batch in BatchPlan(LENGTHS, FixedRows(32), seed=0).epoch(0)]
    assert sum(size != 32 for size in sizes) <= 2
    assert max(sizes) == 32


def test_a_row_longer_than_the_budget_gets_a_batch_of_its_own():
    batches = BatchPlan(np.array([5, 100, 5]), TokenBudget(20), seed=0).epoch(0)
    assert sorted(len(batch) for batch in batches) == [1, 2]


def test_the_plan_depends_on_seed_and_epoch_alone():
    plan, again, other = (BatchPlan(LENGTHS, TokenBudget(4096), seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(plan.epoch(3), again.epoch(3), strict=True))
    assert not np.array_equal(plan.epoch(3)[0], plan.epoch(4)[0])
    assert not np.array_equal(plan.epoch(3)[0], other.epoch(3)[0])


def test_a_position_resumes_exactly_where_it_was():
    plan = BatchPlan(LENGTHS[:500], FixedRows(100), seed=0)
    straight = list(itertools.islice(plan.following(Position()), 12))
    for stop in (1, 5, 7):
        resumed = list(itertools.islice(plan.following(straight[stop - 1][0]), 12 - stop))
        for (position, rows), (expected_position, expected_rows) in zip(resumed, straight[stop:], strict=True):
            assert position == expected_position
            assert np.array_equal(rows, expected_rows)


def test_order_within_a_batch_does_not_follow_the_length():
    """Or short sentences would always draw early times."""
    batches = BatchPlan(LENGTHS, FixedRows(64), seed=0).epoch(0)
    correlations = [np.corrcoef(np.arange(64), LENGTHS[b])[0, 1] for b in batches if len(b) == 64 and LENGTHS[b].std()]
    assert abs(np.mean(correlations)) < 0.03


def test_parts_share_out_all_rows():
    rows = np.arange(10)
    assert [part.tolist() for part in parts(rows, 4)] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert sum(len(part) for part in parts(rows, 16)) == 10


def test_impossible_batches_are_refused():
    nothing = np.array([], dtype=np.int64)
    for make in (lambda: TokenBudget(0), lambda: FixedRows(0), lambda: BatchPlan(nothing, FixedRows(1), seed=0)):
        with pytest.raises(ValueError, match=r"give 1 or more|no sentences"):
            make()
