"""Attention has a mask if and only if the call has one, whatever its values are."""

from __future__ import annotations

import pytest
import torch
import transformers
from backbones import backbone_of
from torch.nn import functional

from diffusionbert.networks.attention import keep_masks
from diffusionbert.networks.base import copy_sharing_parameters


def modernbert() -> transformers.PreTrainedModel:
    """Some of its layers attend to neighbors alone."""
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
        local_attention=4, max_position_embeddings=40, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config).eval()


BACKBONES = {"bert": lambda: backbone_of("bert").eval(), "modernbert": modernbert}
TOKENS = torch.arange(5, 23).view(2, 9)
MASKS = {
    "none": None,
    "all ones": torch.ones_like(TOKENS),
    "padding": torch.ones_like(TOKENS).index_put((torch.tensor(1), torch.arange(6, 9)), torch.tensor(0)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", BACKBONES.values(), ids=BACKBONES)
def test_a_kept_mask_changes_no_answer(make, mask):
    plain = make()
    keeping = copy_sharing_parameters(plain)
    keep_masks(keeping)
    with torch.no_grad():
        expected, found = (one(input_ids=TOKENS, attention_mask=mask).logits for one in (plain, keeping))
    seen = torch.ones_like(TOKENS, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(found[seen], expected[seen])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_values_of_a_mask_do_not_choose_the_kernel(mask, monkeypatch):
    backbone, seen = BACKBONES["bert"](), set()
    keep_masks(backbone)
    plain = functional.scaled_dot_product_attention

    def attention(*inputs, attn_mask=None, **options):
        seen.add(attn_mask is None)
        return plain(*inputs, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    with torch.no_grad():
        backbone(input_ids=TOKENS, attention_mask=mask)
    assert seen == {mask is None}


def test_other_attention_stays_as_it_is():
    backbone = BACKBONES["bert"]()
    backbone.set_attn_implementation("eager")
    keep_masks(backbone)
    assert backbone.config._attn_implementation == "eager"
