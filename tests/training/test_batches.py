"""Batch plans are complete and reproducible and have little padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from diffusionbert.training.batches import BatchPlan, BatchPosition, FixedSequences, TokenBudget, parts

# Lengths like those of real sentences: mostly 10 to 40 tokens, a few long ones.
LENGTHS = np.random.default_rng(0).lognormal(3.2, 0.5, 30_000).astype(np.int64).clip(3, 128)


@pytest.mark.parametrize("batching", [TokenBudget(4096), FixedSequences(32)], ids=str)
def test_every_sequence_appears_once_per_epoch(batching):
    batches = BatchPlan(LENGTHS, batching, seed=0).epoch(0)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(LENGTHS)))


def test_batches_stay_within_the_token_budget_and_use_it():
    batches = BatchPlan(LENGTHS, TokenBudget(4096), seed=0).epoch(0)
    positions = [len(batch) * LENGTHS[batch].max() for batch in batches]
    assert max(positions) <= 4096
    assert np.mean(positions) > 0.95 * 4096


@pytest.mark.parametrize("batching", [TokenBudget(4096), FixedSequences(32)], ids=str)
def test_less_than_ten_percent_is_padding(batching):
    assert 1 - LENGTHS.sum() / sum(BatchPlan(LENGTHS, batching, seed=0).positions()) < 0.1


def test_fixed_batch_sizes_differ_only_at_the_ends_of_pools():
    sizes = [len(batch) for batch in BatchPlan(LENGTHS, FixedSequences(32), seed=0).epoch(0)]
    assert sum(size != 32 for size in sizes) <= 2
    assert max(sizes) == 32


def test_a_sequence_longer_than_the_budget_is_a_batch_by_itself():
    batches = BatchPlan(np.array([5, 100, 5]), TokenBudget(20), seed=0).epoch(0)
    assert sorted(len(batch) for batch in batches) == [1, 2]


def test_the_plan_depends_on_the_seed_and_the_epoch():
    plan, again, other = (BatchPlan(LENGTHS, TokenBudget(4096), seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(plan.epoch(3), again.epoch(3), strict=True))
    assert not np.array_equal(plan.epoch(3)[0], plan.epoch(4)[0])
    assert not np.array_equal(plan.epoch(3)[0], other.epoch(3)[0])


def test_resuming_from_a_position_continues_with_the_same_batches():
    plan = BatchPlan(LENGTHS[:500], FixedSequences(100), seed=0)
    straight = list(itertools.islice(plan.following(BatchPosition()), 12))
    for stop in (1, 5, 7):
        resumed = list(itertools.islice(plan.following(straight[stop - 1][0]), 12 - stop))
        for (position, batch), (expected_position, expected_batch) in zip(resumed, straight[stop:], strict=True):
            assert position == expected_position
            assert np.array_equal(batch, expected_batch)


def test_the_order_within_a_batch_is_independent_of_length():
    """Otherwise short sequences would always draw early times."""
    batches = BatchPlan(LENGTHS, FixedSequences(64), seed=0).epoch(0)
    correlations = [np.corrcoef(np.arange(64), LENGTHS[b])[0, 1] for b in batches if len(b) == 64 and LENGTHS[b].std()]
    assert abs(np.mean(correlations)) < 0.03


def test_parts_cover_a_batch():
    batch = np.arange(10)
    assert [part.tolist() for part in parts(batch, 4)] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert sum(len(part) for part in parts(batch, 16)) == 10


def test_empty_batches_are_rejected():
    with pytest.raises(ValueError, match=r"^tokens per batch \(--batch-tokens\) must be >= 1, got 0; 4096 is usual$"):
        TokenBudget(0)
    with pytest.raises(
        ValueError, match=r"^sequences per batch \(--batch-sequences\) must be >= 1, got 0; 32 is usual$"
    ):
        FixedSequences(0)
    with pytest.raises(ValueError, match=r"^`lengths` must have at least one sequence, got none; give more text$"):
        BatchPlan(np.array([], dtype=np.int64), FixedSequences(1), seed=0)
