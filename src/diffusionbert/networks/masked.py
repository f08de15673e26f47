"""Masked networks: log f(v | x_t) from any Hugging Face `*ForMaskedLM`, conditioned on time by a `TimeConditioning`.

Token ids come in and log-probabilities go out: this module knows nothing about strings, noise or losses.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.shapes import PositionMask, TargetLogProbs, Times, Tokens, TokenSet, Vectors
from diffusionbert.networks.base import (
    attention_kernels,
    head_of,
    log_probs_at,
    max_positions,
    padded_allowed,
    require_length,
)
from diffusionbert.networks.time_conditioning import TimeConditioning, after_first, without_prefix


class Denoiser(nn.Module):
    """A masked language model, conditioned on time, that predicts at target positions only.

    Nothing about a call is stored: threads may call one network at the same time.
    """

    allowed: TokenSet

    def __init__(self, backbone: PreTrainedModel, conditioning: TimeConditioning, allowed: TokenSet) -> None:
        super().__init__()
        self.backbone = backbone
        self.conditioning = conditioning
        conditioning.prepare(backbone)
        self.register_buffer("allowed", padded_allowed(allowed, backbone.config.vocab_size), persistent=False)
        self._head = head_of(backbone)
        self._num_positions = max_positions(backbone)

    @property
    def max_length(self) -> int:
        return self._num_positions - self.conditioning.num_prefix_positions

    def forward(self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        require_length(tokens.shape[1], self.max_length)
        prefix = targets.new_zeros(len(targets), self.conditioning.num_prefix_positions)
        positions = after_first(targets, prefix).flatten().nonzero().squeeze(1)
        call = partial(self.conditioning, tokens=tokens, attention_mask=attention_mask, t=t)
        return log_probs_at(positions, self.backbone, self._head, call, self.allowed)

    def hidden_states(self, tokens: Tokens, attention_mask: PositionMask, t: Times | None = None) -> Vectors:
        """Returns the hidden states of the last layer at every position; t defaults to 0, the time of clean text."""
        require_length(tokens.shape[1], self.max_length)
        if t is None:
            t = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        with attention_kernels():
            hidden: Tensor = self.conditioning(self.backbone.base_model, tokens, attention_mask, t).last_hidden_state
        return without_prefix(hidden, self.conditioning.num_prefix_positions)
