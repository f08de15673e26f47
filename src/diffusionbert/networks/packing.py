"""Packed sequences: one row of all tokens without padding, in which each sequence attends only to itself.

    [CLS] a b [SEP] [PAD] [PAD]
    [CLS] c d e f   [SEP]          →   [CLS] a b [SEP] [CLS] c d e f [SEP]     starts 0 4 10

Short sentences have a lot of padding, even in batches of similar lengths, which are padded to a multiple of 8. On a
GPU, attention runs in torch's variable-length kernel; elsewhere in an ordinary one with a mask, which the tests compare
it with. Both are registered with transformers as one attention implementation; calls without a packing get `sdpa`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diffusionbert.diffusion.shapes import Packing, Tokens
from diffusionbert.networks.time_conditioning import TimeAgnostic, TimeConditioning

NAME = "diffusionbert_packed"
"""The name of the attention implementation."""


def can_pack(backbone: PreTrainedModel, conditioning: TimeConditioning) -> bool:
    """Whether a network can read packed sequences: if time-agnostic, without attention dropout, without windows."""
    config = backbone.config
    match type(backbone).__name__:
        case "BertForMaskedLM":
            has_plain_attention = config.attention_probs_dropout_prob == 0
        case "ModernBertForMaskedLM":
            has_plain_attention = config.attention_dropout == 0 and set(config.layer_types) == {"full_attention"}
        case _:
            has_plain_attention = False
    head_size = config.hidden_size // config.num_attention_heads
    return isinstance(conditioning, TimeAgnostic) and has_plain_attention and head_size % 8 == 0


def has_packed_kernel() -> bool:
    """Whether torch has variable-length attention."""
    return find_spec("torch.nn.attention.varlen") is not None


def prepare(backbone: PreTrainedModel) -> None:
    """Lets a backbone's attention take packed sequences; other calls are unchanged."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    backbone.set_attn_implementation(NAME)


def call_packed(encoder: Any, tokens: Tokens, packing: Packing) -> Tensor:
    """The hidden states [P, D] of packed tokens."""
    # With these, neither class builds a mask; `sequence_starts` takes its place.
    is_modern = encoder.config.model_type == "modernbert"
    mask = dict.fromkeys(("full_attention", "sliding_attention")) if is_modern else None
    hidden: Tensor = encoder(
        input_ids=packing.pack(tokens)[None],
        position_ids=packing.offsets[None],
        attention_mask=mask,
        sequence_starts=packing.starts,
        longest=encoder.config.max_position_embeddings,  # the same for all batches: a new number would recompile
    ).last_hidden_state
    return hidden[0]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sequence_starts: Tensor | None = None,
    longest: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of heads [1, H, P, D] within sequences; returns [1, P, H, D]."""
    if sequence_starts is None:
        given: Any = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return given[0], None
    if not query.is_cuda:
        row = torch.arange(query.shape[2], device=query.device)
        sequence = torch.searchsorted(sequence_starts, row, right=True)
        same = sequence[:, None] == sequence
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=same, scale=scaling)
        return attended.transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype
    q, k, v = (tensor.transpose(1, 2).squeeze(0).to(low) for tensor in (query, key, value))
    found: Any = varlen_attn(q, k, v, sequence_starts, sequence_starts, longest, longest, scale=scaling)
    return found[None], None
