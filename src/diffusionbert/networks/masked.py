"""Masked networks: log f(v | x_t) from any Hugging Face `*ForMaskedLM`, conditioned on time by a `TimeConditioning`.

Token ids come in and log-probabilities go out: this module knows nothing about strings, noise or losses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.shapes import (
    Batch,
    PositionMask,
    TargetIndices,
    TargetLogProbs,
    Targets,
    TargetVectors,
    Times,
    Tokens,
    TokenSet,
    Vectors,
)
from diffusionbert.diffusion.tokens import Prediction
from diffusionbert.networks.base import TargetHead, attention_kernels, max_positions, padded_allowed, require_length
from diffusionbert.networks.packing import call_packed, can_pack
from diffusionbert.networks.time_conditioning import TimeConditioning, without_prefix


@runtime_checkable
class MaskedNetwork(Protocol):
    """A network over tokens that also returns hidden states."""

    def __call__(self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        """See `Network`."""

    def hidden_states(self, tokens: Tokens, attention_mask: PositionMask, t: Times | None = None) -> Vectors:
        """The hidden states of the last layer at every position."""


class Denoiser(nn.Module):
    """A masked language model, conditioned on time, that predicts at target positions only.

    Nothing about a call is stored, so threads may call one network at the same time.
    """

    allowed: TokenSet

    def __init__(self, backbone: PreTrainedModel, conditioning: TimeConditioning, allowed: TokenSet) -> None:
        super().__init__()
        self.backbone = backbone
        self.conditioning = conditioning
        conditioning.prepare(backbone)
        self.register_buffer("allowed", padded_allowed(allowed, backbone.config.vocab_size), persistent=False)
        self._head = TargetHead(backbone)
        self._num_positions = max_positions(backbone)

    @property
    def max_length(self) -> int:
        return self._num_positions - self.conditioning.num_prefix_positions

    def forward(
        self,
        tokens: Tokens,
        attention_mask: PositionMask | None,
        t: Times,
        targets: PositionMask | None = None,
        positions: TargetIndices | None = None,
    ) -> TargetLogProbs:
        """log f(v | x_t) at the targets, a mask or indices; without an attention mask, nothing is padding."""
        if positions is None:
            assert targets is not None
            positions = Targets.of(targets).positions
        return self.log_probs(self.hidden_at(tokens, attention_mask, t, positions))

    def log_probs_at(
        self, tokens: Tokens, attention_mask: PositionMask | None, t: Times, positions: TargetIndices
    ) -> TargetLogProbs:
        log_f: TargetLogProbs = self(tokens, attention_mask, t, positions=positions)
        return log_f

    def predict(self, x_t: Batch, t: Times, targets: Targets) -> Prediction:
        """Same as calling the network, but computed only as far as needed."""
        if x_t.packing is None:
            hidden = self.hidden_at(x_t.tokens, x_t.attention_mask, t, targets.positions)
        else:
            with attention_kernels():
                packed = call_packed(self.backbone.base_model, x_t.tokens, x_t.packing)
            hidden = packed.index_select(0, x_t.packing.indices.index_select(0, targets.positions))
        return self._head.prediction(self.backbone, hidden, self.allowed)

    @property
    def can_pack(self) -> bool:
        """Whether `predict` can read packed batches."""
        return can_pack(self.backbone, self.conditioning)

    def compile_training(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles the encoder, and the head with its reductions, for any shapes."""
        self.backbone.base_model.compile(dynamic=True, backend=backend)
        self._head.compile(backend)

    def hidden_at(
        self, tokens: Tokens, attention_mask: PositionMask | None, t: Times, positions: TargetIndices
    ) -> TargetVectors:
        """The hidden states (or logits) that give the distribution at each target position."""
        length, num_inserted = tokens.shape[1], self.conditioning.num_prefix_positions
        require_length(length, self.max_length)
        if num_inserted:  # after the first position of each sequence
            positions = positions + num_inserted * (positions // length + (positions % length > 0))
        call = partial(self.conditioning, tokens=tokens, attention_mask=attention_mask, t=t)
        return self._head.hidden_at(positions, self.backbone, call)

    def log_probs(self, hidden: TargetVectors) -> TargetLogProbs:
        """log f(v | x_t) from the output of `hidden_at`."""
        return self._head.log_probs(self.backbone, hidden, self.allowed)

    def hidden_states(self, tokens: Tokens, attention_mask: PositionMask, t: Times | None = None) -> Vectors:
        """Returns the hidden states of the last layer at every position; t defaults to 0, the time of clean text."""
        require_length(tokens.shape[1], self.max_length)
        if t is None:
            t = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        with attention_kernels():
            hidden: Tensor = self.conditioning(self.backbone.base_model, tokens, attention_mask, t).last_hidden_state
        return without_prefix(hidden, self.conditioning.num_prefix_positions)
