"""Attention that has a mask if and only if the call has one.

transformers leaves out a mask that masks nothing: it looks at its values, for which a GPU is waited for, but not while
a CUDA graph is captured. A graph would then run other kernels than a plain call, with a mask that is all ones or
without one, and a compiled layer would be compiled anew in the midst of a capture.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME: Final = "diffusionbert_sdpa"
"""Of the attention implementation in transformers' registry."""


def keep_masks(backbone: PreTrainedModel) -> None:
    """Lets the attention of a backbone use masks as they are given; only where it is torch's own."""
    if backbone.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(NAME, _mask)
        backbone.set_attn_implementation(NAME)


def _mask(
    *,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    is_local = local_size is not None and kv_length >= local_size
    if allow_is_bidirectional_skip and attention_mask is None and not is_local:
        return None
    found: Tensor | None = sdpa_mask(
        kv_length=kv_length, attention_mask=attention_mask, local_size=local_size, **options
    )
    return found
