"""Packed sequences: several of them side by side in each row, attending only to themselves (Krell et al. 2021).

    [CLS] a b [SEP] [PAD] [PAD]
    [CLS] c d e f   [SEP]          →   [CLS] a b [SEP] [CLS] c d e f [SEP]     positions 0 1 2 3 0 1 2 3 4 5

Short sentences have a lot of padding, even in batches of similar lengths, and attention kernels work on tiles of 64 or
128 positions, which a short sentence does not fill. Rows of 128 positions have next to no padding and one shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from diffusionbert.diffusion.shapes import Packing, Tokens
from diffusionbert.networks.time_conditioning import TimeAgnostic, TimeConditioning


def can_pack(backbone: PreTrainedModel, conditioning: TimeConditioning) -> bool:
    """Whether a network can read packed sequences: if it is time-agnostic and all of its layers attend globally."""
    match type(backbone).__name__:
        case "BertForMaskedLM":
            is_global = True
        case "ModernBertForMaskedLM":
            is_global = set(backbone.config.layer_types) == {"full_attention"}
        case _:
            is_global = False
    return isinstance(conditioning, TimeAgnostic) and is_global


def call_packed(encoder: Any, tokens: Tokens, packing: Packing) -> Tensor:
    """The hidden states [R · W, D] of packed tokens."""
    mask: Any = packing.mask
    if encoder.config.model_type == "modernbert":  # it has a mask per kind of layer
        mask = {"full_attention": mask}
    found: Tensor = encoder(
        input_ids=packing.pack(tokens), position_ids=packing.offsets, attention_mask=mask
    ).last_hidden_state
    return found.flatten(0, 1)
