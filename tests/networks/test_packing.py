"""Packed sequences give the hidden states, losses and gradients of padded ones."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_worker import MadeUpSequences

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, Packing
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.loading import NewBert, NewModernBert
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.training import optim
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.step import packs

SIZE, LENGTHS = 30, (12, 7, 9, 3, 12, 5)
STATISTICS = TokenStatistics(3, 0, torch.arange(SIZE) >= 5, (), torch.arange(SIZE) + 1)
FAMILIES = {"bert": NewBert, "modernbert": NewModernBert}


def module(family: str, time: TimeEmbedding = TimeEmbedding.NONE, *, complementary: bool = False) -> TrainingModule:
    torch.manual_seed(0)
    backbone = FAMILIES[family](2, 32, 2, 0.0).build(SIZE, 20, 0, causal=False)
    objective = DiscreteTimeConfig(num_steps=8, complementary=complementary)
    config = RunConfig(DataConfig("none", max_length=16), time=time, objective=objective)
    return config.make_module(STATISTICS, backbone).train()


def batch() -> Batch:
    tokens = torch.randint(5, SIZE, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 1
    for sequence, length in enumerate(LENGTHS):
        tokens[sequence, length - 1], tokens[sequence, length:] = 2, 0
    return Batch.of(tokens, tokens >= 5, tokens > 0)


def test_a_packing_says_where_positions_are():
    found = Packing.of(torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]) == 1, width=4)
    assert found.sequences.tolist() == [[1, 1, 1, 0, 0, 2, -1, -1]]  # eight wide, and the longest first
    assert found.positions[found.sequences >= 0].tolist() == [3, 4, 5, 0, 1, 6]
    assert found.offsets[found.sequences >= 0].tolist() == [0, 1, 2, 0, 1, 0]
    assert found.indices[found.positions[found.sequences >= 0]].tolist() == list(range(6))
    assert found.mask[0, 0, 4].tolist() == [False, False, False, True, True, False, False, False]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 5))
def test_every_position_is_packed_once_and_attends_to_its_own_sequence(lengths, width):
    attention_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    found = Packing.of(attention_mask, 8 * width)
    assert found.positions.shape[1] == max(8 * width, max(lengths) + -max(lengths) % 8)
    is_used = found.sequences >= 0
    assert sorted(found.positions[is_used].tolist()) == attention_mask.flatten().nonzero().squeeze(1).tolist()
    assert is_used.any(dim=1).all()
    used = attention_mask.flatten().nonzero().squeeze(1)
    assert torch.equal(found.positions.flatten()[found.indices[used]], used)
    sequence = torch.arange(len(lengths))[:, None].expand_as(attention_mask)
    assert torch.equal(found.pack(sequence)[is_used], found.sequences[is_used])
    assert torch.equal(found.mask.sum(dim=-1).squeeze(1)[is_used], torch.tensor(lengths)[found.sequences[is_used]])


def test_rows_of_short_sentences_are_full():
    lengths = torch.randint(5, 60, (4000,), generator=torch.Generator().manual_seed(0))
    found = Packing.of(torch.arange(60) < lengths[:, None])
    assert found.positions.shape[1] == 128
    assert int(lengths.sum()) / found.positions.numel() > 0.99


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "complementary"), [(16, False), (64, False), (32, True)])
def test_packed_and_padded_sequences_have_the_same_loss_and_gradients(family, width, complementary):
    padded, x = module(family, complementary=complementary), batch()
    packed = copy.deepcopy(padded)
    assert packed.network.can_pack
    x_packed = replace(x, packing=Packing.of(x.attention_mask, width))
    shapes = []
    packed.network.backbone.base_model.register_forward_hook(
        lambda *found: shapes.append(found[-1].last_hidden_state.shape[:2])
    )
    results = [made(one, Noise(0, 1), 10.0) for made, one in ((padded, x), (packed, x_packed))]
    num_rows, row_width = x_packed.packing.positions.shape
    assert shapes == [(num_rows * (2 if complementary else 1), row_width)]
    for result in results:
        result.backward()
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0)
    for mine, theirs in zip(packed.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_only_time_agnostic_networks_that_attend_globally_are_packed(caplog):
    settings = TrainingConfig(packing=True)
    assert packs(module("bert"), settings)
    assert packs(module("modernbert"), settings)
    assert not packs(module("bert"), TrainingConfig())
    assert not caplog.messages
    windowed = module("modernbert")
    windowed.network.backbone.config.layer_types = ["full_attention", "sliding_attention"]
    with caplog.at_level("WARNING", logger="diffusionbert"):
        assert not packs(windowed, settings)
        assert not packs(module("bert", TimeEmbedding.LAYERS), settings)
    assert caplog.text.count("training with padding: --packing needs a time-agnostic BERT") == 2


@pytest.mark.parametrize("packed", [True, False])
def test_the_measured_batch_is_packed_or_padded_as_in_training(monkeypatch, packed):
    seconds, seen, measured = itertools.count(), [], module("bert")
    monkeypatch.setattr(optim, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    measured.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    sequences = MadeUpSequences(2000, seed=1)
    found = optim.measure(measured, sequences, TrainingConfig(), torch.device("cpu"), 600, packed=packed)
    x, median = seen[0], int(np.median(sequences.lengths))
    assert len(seen) == 3
    assert set(x.attention_mask.sum(dim=1).tolist()) == (set(sequences.lengths.tolist()) if packed else {median})
    rows = x.packing.positions if packed else x.tokens
    assert rows.shape == ((5, 128) if packed else (600 // median, median))
    num_positions = int(x.attention_mask.sum())
    assert 550 < num_positions < 650
    assert found.tokens_per_second == 2 * num_positions  # two passes in one second
