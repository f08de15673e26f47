"""Masked networks: log f(v | x_t) from any Hugging Face `*ForMaskedLM`, conditioned on time by a `TimeConditioning`.

Token ids come in and log-probabilities go out: this module knows nothing about strings, noise or losses.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.conditioning import TimeConditioning, after_first, without_prefix
from diffusionbert.networks.base import (
    attention_kernels,
    distribution,
    num_reserved_positions,
    padded_writable,
    require_length,
)
from diffusionbert.networks.heads import head_of, logits_at
from diffusionbert.shapes import AskedLogProbs, Places, RowTimes, Tokens, TokenSet, Vectors


@final
class Denoiser(nn.Module):
    """A masked language model, conditioned on time, that predicts at target positions only.

    `writable` marks the allowed tokens. Where the model's vocabulary is larger than the tokenizer's, the ids beyond are
    padding and never allowed.

    Nothing about a call is stored: threads may call one network at the same time.
    """

    writable: TokenSet

    def __init__(self, backbone: PreTrainedModel, conditioning: TimeConditioning, writable: TokenSet) -> None:
        super().__init__()
        self.backbone = backbone
        self.conditioning = conditioning
        conditioning.prepare(backbone)
        # Not persistent: it belongs to the vocabulary and is no parameter.
        self.register_buffer("writable", padded_writable(writable, backbone.config.vocab_size), persistent=False)
        self._head = head_of(backbone)
        self._num_positions = backbone.config.max_position_embeddings - num_reserved_positions(backbone)

    @property
    def max_length(self) -> int:
        """The number of positions a sequence may have."""
        return int(self._num_positions - self.conditioning.num_prefix)

    def forward(self, tokens: Tokens, attend: Places, t: RowTimes, asked: Places) -> AskedLogProbs:
        """Returns log f(v | x_t) at the target positions, in float32 or better."""
        require_length(tokens.shape[1], self.max_length)
        prefix = asked.new_zeros(len(asked), self.conditioning.num_prefix)
        positions = after_first(asked, prefix).flatten().nonzero().squeeze(1)
        with attention_kernels():
            logits = logits_at(
                positions, self.backbone, self._head, lambda model: self.conditioning(model, tokens, attend, t)
            )
        return distribution(logits, self.writable)

    def hidden_states(self, tokens: Tokens, attend: Places, t: RowTimes | None = None) -> Vectors:
        """Returns the hidden states of the last layer at every position; t defaults to 0, the time of clean text."""
        require_length(tokens.shape[1], self.max_length)
        if t is None:
            t = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        with attention_kernels():
            hidden: Tensor = self.conditioning(self.backbone.base_model, tokens, attend, t).last_hidden_state
        return without_prefix(hidden, self.conditioning.num_prefix)
