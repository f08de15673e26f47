"""New networks: ModernBERT and its causal twin differ in the mask alone, and have BERT's size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backbones import NUM_TOKENIZER_IDS, VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from diffusionbert.networks.loading import (
    NewBert,
    NewDecoder,
    NewModernBert,
    NewModernBertDecoder,
    NewNetwork,
    Pretrained,
    of_family,
)

POSITIONS = 12


def built(network: NewNetwork, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return network.build(vocab_size, POSITIONS, 0, causal=network.as_causal() == network).eval()


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def twins() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A masked and a causal network with the same parameters."""
    masked, causal = built(NewModernBert(3, 32, 4, 0.0)), built(NewModernBertDecoder(3, 32, 4, 0.0))
    for parameter in masked.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = masked.state_dict()
    copied = {}
    for name, value in state.items():
        if name.endswith("attn.Wqkv.weight"):
            for part, weight in zip("qkv", value.chunk(3), strict=True):
                copied[name.replace("Wqkv", f"{part}_proj")] = weight
        else:
            copied[f"lm_{name}" if name.startswith("head.") else name] = value
    causal.load_state_dict(copied)
    return masked, causal


@torch.no_grad()
def test_the_causal_twin_differs_in_the_mask_alone():
    masked, causal = twins()
    assert num_parameters(masked) == num_parameters(causal)
    tokens = torch.randint(5, NUM_TOKENIZER_IDS, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
    to_the_left = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()[None, None]
    mask = {"full_attention": to_the_left, "sliding_attention": to_the_left}
    expected = masked(tokens, attention_mask=mask).logits
    torch.testing.assert_close(causal(tokens).logits, expected)
    assert not torch.allclose(masked(tokens).logits, expected, atol=1e-2)


@pytest.mark.parametrize("width", [32, 128, 384, 512])
def test_a_layer_has_about_as_many_parameters_as_berts(width):
    modern = [num_parameters(built(NewModernBert(layers, width, 2), 10)) for layers in (1, 2)]
    bert = [num_parameters(built(NewBert(layers, width, 2), 10)) for layers in (1, 2)]
    assert modern[1] - modern[0] == pytest.approx(bert[1] - bert[0], rel=0.04)


@pytest.mark.parametrize("network", [NewModernBert(4, 32, 2, 0.3), NewModernBertDecoder(4, 32, 2, 0.3)], ids=str)
def test_all_layers_are_global_and_all_dropouts_are_set(network):
    config = built(network).config
    assert set(config.layer_types) == {"full_attention"}
    assert {config.embedding_dropout, config.attention_dropout, config.mlp_dropout} == {0.3}
    assert (config._attn_implementation, config.pad_token_id) == ("sdpa", 0)
    assert config.max_position_embeddings == POSITIONS


@pytest.mark.parametrize(
    ("network", "auto"),
    [(NewModernBert(2, 32, 2), AutoModelForMaskedLM), (NewModernBertDecoder(2, 32, 2), AutoModelForCausalLM)],
    ids=["masked", "causal"],
)
@torch.no_grad()
def test_transformers_opens_a_saved_network(network, auto, tmp_path: Path):
    model = built(network)
    model.save_pretrained(tmp_path)
    opened, tokens = auto.from_pretrained(tmp_path).eval(), torch.arange(POSITIONS)[None]
    assert torch.equal(opened(tokens).logits, model(tokens).logits)


def test_families_have_a_masked_and_a_causal_network_of_each_size():
    size = 3, 48, 4, 0.2
    bert, gpt2, modern, decoder = (made(*size) for made in (NewBert, NewDecoder, NewModernBert, NewModernBertDecoder))
    for masked, causal in ((bert, gpt2), (modern, decoder)):
        assert masked.as_causal() == causal.as_causal() == causal
        assert (of_family(masked, "modern"), of_family(causal, "modern")) == (modern, decoder)
        assert (of_family(masked, "bert"), of_family(causal, "bert")) == (bert, gpt2)
    with pytest.raises(ValueError, match="unknown family of backbones 'gpt'; known: bert, modern"):
        of_family(bert, "gpt")
    with pytest.raises(ValueError, match=r"for new networks only, got pretrained .*; leave out --backbone"):
        of_family(Pretrained("some/model"), "modern")


def test_masked_and_causal_networks_are_not_confused():
    with pytest.raises(ValueError, match=r"needs a causal language model, got a new ModernBERT; use NewModernBertDec"):
        NewModernBert().build(VOCAB_SIZE, POSITIONS, 0, causal=True)
    with pytest.raises(ValueError, match="needs a masked language model, got a new ModernBERT decoder; use"):
        NewModernBertDecoder().build(VOCAB_SIZE, POSITIONS, 0, causal=False)
