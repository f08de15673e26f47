"""Causal networks: log p(x_i | x_1 … x_{i-1}) from any Hugging Face `*ForCausalLM` (Vaswani et al. 2017; Radford et al.
2019).

A token is predicted at the position before it, so the first position of a sequence has no prediction. Padding comes at
the end and a decoder never attends to the right, so no mask is passed and attention runs in its fused causal kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from diffusionbert.diffusion.shapes import (
    PositionMask,
    TargetIndices,
    TargetLogProbs,
    Targets,
    TargetVectors,
    Tokens,
    TokenSet,
)
from diffusionbert.diffusion.tokens import Prediction
from diffusionbert.networks.base import TargetHead, padded_allowed, require_length


@dataclass(frozen=True, eq=False)
class KeyValues:
    """The keys and values of the positions that a decoder has read. Immutable: reading on returns a new one."""

    cache: DynamicCache
    num_read: int

    def select(self, sequences: TargetIndices) -> KeyValues:
        """The keys and values of these sequences alone."""
        selected = self.copied_cache()
        selected.batch_select_indices(sequences)
        return KeyValues(selected, self.num_read)

    def copied_cache(self) -> DynamicCache:
        """A cache that can grow without changing this one: layers replace their tensors and never write to them."""
        new = copy(self.cache)
        new.layers = [copy(layer) for layer in self.cache.layers]
        return new


@runtime_checkable
class CausalNetwork(Protocol):
    """A network that predicts tokens from left to right."""

    def __call__(self, tokens: Tokens, attention_mask: PositionMask, targets: PositionMask) -> TargetLogProbs:
        """Returns log p(v | x_<i) at the N target positions i: a distribution over allowed tokens, −∞ at all others."""

    def read(self, tokens: Tokens, cache: KeyValues | None) -> tuple[TargetLogProbs, KeyValues]:
        """Reads the positions after those in the cache; returns log p of each sequence's next token, and the cache."""


class CausalModel(nn.Module):
    """A decoder that predicts at target positions only; threads may call it at the same time."""

    allowed: TokenSet

    def __init__(self, backbone: PreTrainedModel, allowed: TokenSet) -> None:
        super().__init__()
        if backbone.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
            raise ValueError(
                f"{type(backbone).__name__} has no output head: use a *ForCausalLM, such as GPT2LMHeadModel"
            )
        self.backbone = backbone
        self._head = TargetHead(backbone)
        self.register_buffer("allowed", padded_allowed(allowed, backbone.config.vocab_size), persistent=False)

    @property
    def max_length(self) -> int:
        # Models without position embeddings, such as BLOOM, have no limit.
        return int(getattr(self.backbone.config, "max_position_embeddings", sys.maxsize))

    def forward(self, tokens: Tokens, attention_mask: PositionMask, targets: PositionMask) -> TargetLogProbs:
        return self.predict_next(tokens, attention_mask, Targets.of(targets)).dense()

    def predict_next(self, tokens: Tokens, attention_mask: PositionMask, targets: Targets) -> Prediction:
        """Same as calling the network, but computed only as far as needed."""
        require_length(tokens.shape[1], self.max_length)
        _require_causal(attention_mask, targets.mask)
        hidden = self._hidden_at(tokens, targets.positions - 1, use_cache=False)
        return self._head.prediction(self.backbone, hidden, self.allowed)

    def compile_training(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles the decoder, and the head with its reductions, for any shapes."""
        self.backbone.base_model.compile(dynamic=True, backend=backend)
        self._head.compile(backend)

    def read(self, tokens: Tokens, cache: KeyValues | None) -> tuple[TargetLogProbs, KeyValues]:
        num_sequences, length = tokens.shape
        if not length:
            raise ValueError("`tokens` must have at least one token per sequence, got none")
        new = DynamicCache(config=self.backbone.config) if cache is None else cache.copied_cache()
        num_read = length + (0 if cache is None else cache.num_read)
        require_length(num_read, self.max_length)
        last = torch.arange(1, num_sequences + 1, device=tokens.device) * length - 1
        hidden = self._hidden_at(tokens, last, past_key_values=new, use_cache=True)
        return self._head.log_probs(self.backbone, hidden, self.allowed), KeyValues(new, num_read)

    def _hidden_at(self, tokens: Tokens, positions: TargetIndices, **options: Any) -> TargetVectors:
        """The hidden states that predict the token after each of these positions."""
        # Embeddings, not ids: transformers would look for padding in ids and warn that there is no mask.
        words = self.backbone.get_input_embeddings()(tokens)
        inputs = {"inputs_embeds": words, "return_dict": True, **options}
        return self._head.hidden_at(positions, self.backbone, lambda model: model(**inputs))


def _require_causal(attention_mask: PositionMask, targets: PositionMask) -> None:
    """Refuses inputs for which a decoder without an attention mask would be wrong."""
    gaps = attention_mask[:, 1:] & ~attention_mask[:, :-1]
    first_is_target, has_gaps = torch.stack([targets[:, 0].any(), gaps.any()]).tolist()  # one synchronization, not two
    if first_is_target:
        raise ValueError(
            "the first position of a sequence is a target, but a decoder predicts from the positions before it: "
            "begin sequences with a token that is not editable, such as [CLS]"
        )
    if has_gaps:
        raise ValueError("padding comes before text, where a decoder would attend to it: pad sequences at the end")
