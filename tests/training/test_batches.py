"""Batch plans are complete and reproducible and have little padding; a global batch is split over processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from training_worker import MASK, MadeUpSequences, training_module

from diffusionbert.diffusion.rng import Noise
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.masked_lm import MaskedLM
from diffusionbert.objectives.order_agnostic import OrderAgnostic
from diffusionbert.training.batches import (
    BatchPlan,
    BatchPosition,
    FixedSequences,
    TokenBudget,
    micro_batches,
    without_targets,
)

# Lengths like those of real sentences: mostly 10 to 40 tokens, a few long ones.
LENGTHS = np.random.default_rng(0).lognormal(3.2, 0.5, 30_000).astype(np.int64).clip(3, 128)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batching", [TokenBudget(4096), FixedSequences(32)], ids=str)
def test_every_sequence_appears_once_per_epoch(batching, packed):
    batches = BatchPlan(LENGTHS, batching, seed=0, packed=packed).epoch(0)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(LENGTHS)))


def test_batches_stay_within_the_token_budget_and_use_it():
    batches = BatchPlan(LENGTHS, TokenBudget(4096), seed=0).epoch(0)
    positions = [len(batch) * LENGTHS[batch].max() for batch in batches]
    assert max(positions) <= 4096
    assert np.mean(positions) > 0.95 * 4096


@pytest.mark.parametrize("batching", [TokenBudget(4096), FixedSequences(32)], ids=str)
def test_less_than_ten_percent_is_padding(batching):
    assert 1 - LENGTHS.sum() / sum(BatchPlan(LENGTHS, batching, seed=0).positions()) < 0.1


def test_large_batches_have_as_little_padding():
    lengths = np.tile(LENGTHS, 20)
    assert 1 - lengths.sum() / sum(BatchPlan(lengths, TokenBudget(98_304), seed=0).positions()) < 0.03


def test_packed_batches_count_tokens_without_padding_and_mix_lengths():
    batches = BatchPlan(LENGTHS, TokenBudget(4096), seed=0, packed=True).epoch(0)
    tokens = [LENGTHS[batch].sum() for batch in batches]
    assert max(tokens) <= 4096
    assert np.mean(tokens) > 0.98 * 4096
    assert np.mean([LENGTHS[batch].std() for batch in batches]) > 0.9 * LENGTHS.std()


def test_fixed_batch_sizes_differ_only_at_the_ends_of_pools():
    sizes = [len(batch) for batch in BatchPlan(LENGTHS, FixedSequences(32), seed=0).epoch(0)]
    assert sum(size != 32 for size in sizes) <= 2
    assert max(sizes) == 32


def test_a_sequence_longer_than_the_budget_is_a_batch_by_itself():
    batches = BatchPlan(np.array([5, 100, 5]), TokenBudget(20), seed=0).epoch(0)
    assert sorted(len(batch) for batch in batches) == [1, 2]
    assert TokenBudget(20).cut(np.array([5, 100, 5, 15, 1]), packed=True) == [1, 1, 2, 1]


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


def test_empty_batches_are_rejected():
    with pytest.raises(ValueError, match=r"^tokens per batch \(--batch-tokens\) must be >= 1, got 0; 4096 is usual$"):
        TokenBudget(0)
    with pytest.raises(
        ValueError, match=r"^sequences per batch \(--batch-sequences\) must be >= 1, got 0; 32 is usual$"
    ):
        FixedSequences(0)


# ---- the split of a global batch ----


def test_every_sequence_is_in_one_part_and_other_parts_have_no_targets():
    batch = Noise(0).stratify(MadeUpSequences(100, seed=1).batch(list(range(10, 15))))
    found, tokens = [], 0
    for index in range(8):
        (part,) = micro_batches(batch, 8, index, None)
        tokens += int(part.num_tokens)
        if index < 5:
            found += part.example.tolist()
        else:
            assert int(part.num_tokens) == 0
            assert len(part.tokens) == 1
            assert bool(part.attention_mask.any())
    assert sorted(found) == list(range(10, 15))
    assert tokens == int(batch.num_tokens)


@pytest.mark.parametrize(("sequences", "limit", "count"), [(5, 20, 3), (16, 1, 2), (7, None, 4)])
def test_every_process_has_equally_many_parts(sequences, limit, count):
    """Otherwise the exchange of gradients would never end."""
    batch = Noise(0).stratify(MadeUpSequences(100, seed=1).batch(list(range(sequences))))
    lengths, found = set(), []
    for index in range(count):
        parts = micro_batches(batch, count, index, limit)
        lengths.add(len(parts))
        found += [name for part in parts if part.num_tokens for name in part.example.tolist()]
    assert len(lengths) == 1
    assert sorted(found) == list(range(sequences))


@pytest.mark.parametrize("sequences", [3, 5, 16])
def test_no_part_exceeds_the_limit(sequences):
    batch = MadeUpSequences(100, seed=1).batch(list(range(sequences)))
    longest = batch.tokens.shape[1]
    for limit in range(longest, longest * sequences):
        assert max(part.tokens.numel() for part in micro_batches(batch, 1, 0, limit)) <= limit


OBJECTIVES = {
    "discrete": lambda module: module.objective,
    "continuous": lambda module: ContinuousTime(module.objective.process),
    "order-agnostic": lambda module: OrderAgnostic(MASK),
    "masked-lm": lambda module: MaskedLM(MASK, torch.arange(30) > MASK, rate=0.5),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_without_targets_has_zero_loss_and_a_gradient_for_every_parameter(name):
    """As a process without sequences needs it."""
    module = training_module(dropout=0.0)
    tested = TrainingModule(module.network, OBJECTIVES[name](module))
    batch = Noise(0).stratify(MadeUpSequences(3, seed=1).batch([0, 1, 2]))
    loss = tested(without_targets(batch), Noise(0), 10.0)
    assert float(loss.detach()) == 0
    loss.backward()
    for label, parameter in tested.named_parameters():
        assert parameter.grad is not None, label
        assert not bool(parameter.grad.any()), label
