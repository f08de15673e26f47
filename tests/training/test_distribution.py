"""Training on several processes: the split of a global batch."""

from __future__ import annotations

import pytest
import torch
from training_worker import MASK, MadeUpSequences, training_module

from diffusionbert.diffusion.rng import Noise
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.masked_lm import MaskedLM
from diffusionbert.objectives.order_agnostic import OrderAgnostic
from diffusionbert.training.distribution import micro_batches, without_targets


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
            assert bool(part.attend.any())
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
