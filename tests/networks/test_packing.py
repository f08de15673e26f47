"""Packed sequences give the hidden states, losses and gradients of padded ones."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForMaskedLM

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, Packing
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks import packing
from diffusionbert.networks.loading import NewBert, NewModernBert
from diffusionbert.networks.time_conditioning import TimeAgnostic, TimeEmbedding
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.step import packs

SIZE, LENGTHS = 30, (12, 7, 9, 3, 12, 5)
STATISTICS = TokenStatistics(3, 0, torch.arange(SIZE) >= 5, (), torch.arange(SIZE) + 1)
FAMILIES = {"bert": NewBert, "modernbert": NewModernBert}


def module(family: str, time: TimeEmbedding = TimeEmbedding.NONE) -> TrainingModule:
    torch.manual_seed(0)
    backbone = FAMILIES[family](2, 32, 2, 0.0).build(SIZE, 20, 0, causal=False)
    config = RunConfig(DataConfig("none", max_length=16), time=time, objective=DiscreteTimeConfig(num_steps=8))
    return config.make_module(STATISTICS, backbone).train()


def batch() -> Batch:
    tokens = torch.randint(5, SIZE, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 1
    for sequence, length in enumerate(LENGTHS):
        tokens[sequence, length - 1], tokens[sequence, length:] = 2, 0
    return Batch.of(tokens, tokens >= 5, tokens > 0)


def test_a_packing_says_where_positions_are():
    found = Packing.of(torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]) == 1)
    assert found.positions.tolist() == [0, 1, 3, 4, 5, 6]
    assert found.offsets.tolist() == [0, 1, 0, 1, 2, 0]
    assert found.starts.tolist() == [0, 2, 5, 6]
    assert found.starts.dtype == torch.int32
    assert found.rows[found.positions].tolist() == list(range(6))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_sequences_have_the_same_loss_and_gradients(family, monkeypatch):
    padded, x = module(family), batch()
    packed = copy.deepcopy(padded)
    assert packed.network.prepare_packing()
    rows = []
    monkeypatch.setattr(
        packing, "_attention", lambda *a, f=packing._attention, **k: rows.append(a[1].shape[2]) or f(*a, **k)
    )
    packing.prepare(packed.network.backbone)
    results = [made(one, Noise(0, 1), 10.0) for made, one in ((padded, x), (packed, x.packed()), (packed, x))]
    assert rows == [sum(LENGTHS)] * 2 + [max(LENGTHS)] * 2  # two layers each: without padding, and with it
    for result in results[:2]:
        result.backward()
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0)
    assert torch.equal(results[2], results[0])  # other calls are not touched
    for mine, theirs in zip(packed.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_network_that_was_packed_is_exported_as_it_was(tmp_path):
    made = module("modernbert")
    made.network.prepare_packing()
    made.network.backbone.save_pretrained(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_only_networks_whose_attention_is_plain_are_packed():
    def backbone(family, dropout=0.0):
        return FAMILIES[family](2, 32, 2, dropout).build(SIZE, 20, 0, causal=False)

    plain = TimeAgnostic()
    assert packing.can_pack(backbone("bert"), plain)
    assert packing.can_pack(backbone("modernbert"), plain)
    assert not packing.can_pack(backbone("bert", 0.1), plain)
    assert not packing.can_pack(backbone("modernbert", 0.1), plain)
    narrow = NewBert(1, 12, 3, 0.0).build(SIZE, 20, 0, causal=False)
    assert not packing.can_pack(narrow, plain)
    timed = module("bert", TimeEmbedding.LAYERS).network
    assert not packing.can_pack(timed.backbone, timed.conditioning)
    windowed = backbone("modernbert")
    windowed.config.layer_types = ["full_attention", "sliding_attention"]
    assert not packing.can_pack(windowed, plain)


def test_a_cpu_trains_with_padding_and_says_so(caplog):
    made, settings = module("bert"), TrainingConfig(precision="bf16")
    assert not packs(made, settings, torch.device("cpu"))
    assert not caplog.messages
    with caplog.at_level("WARNING", logger="diffusionbert"):
        assert not packs(made, replace(settings, packing=True), torch.device("cpu"))
    assert "training with padding: --packing needs a GPU" in caplog.text
    assert made.network.backbone.config._attn_implementation == "sdpa"
