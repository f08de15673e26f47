"""Decoders: log p(x_i | x_1 … x_{i-1}) from any Hugging Face `*ForCausalLM` (Vaswani et al. 2017; Radford et al. 2019).

What stands at a place is answered from the place before, so the first place of a row has no answer. Padding stands at
the end of rows and a decoder never looks right: no mask is passed, and attention runs in its fused causal kernel.

Token ids come in and log-probabilities go out: this module knows nothing of strings, noise or losses.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, PreTrainedModel

from diffusionbert.conditioning import rerouted
from diffusionbert.networks.base import ATTENTION, distribution, padded_writable
from diffusionbert.shapes import AskedLogProbs, AskedRows, Places, Tokens, TokenSet


@runtime_checkable
class KeyValues(Protocol):
    """The keys and values of the positions that a decoder has read. It never changes: reading on gives another one."""

    def select(self, sequences: AskedRows) -> KeyValues:
        """Those of these sequences alone."""


@runtime_checkable
class CausalNetwork(Protocol):
    """What is asked from left to right: which words may stand here, after what stands before?"""

    def __call__(self, tokens: Tokens, attend: Places, asked: Places) -> AskedLogProbs:
        """Gives log p(v | x_<i) at the N asked places i: a distribution over writable tokens, −∞ at all others."""

    def read(self, tokens: Tokens, cache: KeyValues | None) -> tuple[AskedLogProbs, KeyValues]:
        """Reads the positions after those in the cache; returns log p of each sequence's next token, and the cache."""


@final
class CausalModel(nn.Module):
    """A decoder that answers at asked places only.

    `writable` marks the ids that may be written, over which each answer sums to one. Where the model's vocabulary is
    larger than the tokenizer's, the rows beyond are padding and never written.

    One call at a time: a forward takes the backbone's head in hand while it runs, so threads take turns.
    """

    writable: TokenSet

    def __init__(self, backbone: PreTrainedModel, writable: TokenSet) -> None:
        super().__init__()
        self.backbone = backbone
        self._head_name = _name_of_head(backbone)
        # Not persistent: it belongs to the vocabulary, and is no weight.
        self.register_buffer("writable", padded_writable(writable, backbone.config.vocab_size), persistent=False)

    @property
    def max_length(self) -> int:
        """The number of places a row may have."""
        # Models that have no vectors of positions, such as BLOOM, read on and on.
        return int(getattr(self.backbone.config, "max_position_embeddings", sys.maxsize))

    def forward(self, tokens: Tokens, attend: Places, asked: Places) -> AskedLogProbs:
        """Gives log p(v | x_<i) at the asked places i, in float32 or better."""
        self.require_room(tokens.shape[1])
        _require_causal(attend, asked)
        places = functional.pad(asked[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
        return self.log_probs(tokens, places, use_cache=False)

    def read(self, tokens: Tokens, cache: KeyValues | None) -> tuple[AskedLogProbs, KeyValues]:
        """Reads the positions after those in the cache; returns log p of each sequence's next token, and the cache."""
        num_sequences, length = tokens.shape
        if not length:
            raise ValueError("there is nothing to read, and the next token depends on what was read; give a token")
        assert isinstance(cache, _DynamicKeyValues | None)
        new = DynamicCache(config=self.backbone.config) if cache is None else _copied(cache.cache)
        num_read = length + (0 if cache is None else cache.num_read)
        self.require_room(num_read)
        last = torch.arange(1, num_sequences + 1, device=tokens.device) * length - 1
        log_p = self.log_probs(tokens, last, past_key_values=new, use_cache=True)
        return log_p, _DynamicKeyValues(new, num_read)

    def log_probs(self, tokens: Tokens, places: AskedRows, **options: Any) -> AskedLogProbs:
        """Gives the distribution of what follows these places, numbered through all rows."""
        at_places = partial(_at_places, places)
        with sdpa_kernel(ATTENTION), rerouted(self.backbone, {self._head_name: at_places}):
            # Vectors and not ids, in which transformers would look for padding and warn that no mask is given.
            words = self.backbone.get_input_embeddings()(tokens)
            logits: Tensor = self.backbone(inputs_embeds=words, return_dict=True, **options).logits.squeeze(0)
        return distribution(logits, self.writable)

    def require_room(self, length: int) -> None:
        """Refuses rows that are longer than the decoder reads."""
        if length > self.max_length:
            raise ValueError(
                f"rows have {length} places, but this network reads at most {self.max_length}: "
                "cut or split the sentences, or take a backbone with more positions"
            )


@final
@dataclass(frozen=True, eq=False)
class _DynamicKeyValues:
    """Keys and values in a `DynamicCache` that nobody changes any more."""

    cache: DynamicCache
    num_read: int

    def select(self, sequences: AskedRows) -> KeyValues:
        """Those of these sequences alone."""
        selected = _copied(self.cache)
        selected.batch_select_indices(sequences)
        return _DynamicKeyValues(selected, self.num_read)


def _copied(cache: DynamicCache) -> DynamicCache:
    """A cache that can grow without changing the first; layers replace tensors and never write them."""
    new = copy(cache)
    new.layers = [copy(layer) for layer in cache.layers]
    return new


def new_decoder(
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    dropout: float,
    max_positions: int,
    pad_id: int,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> PreTrainedModel:
    """A GPT-2 with random weights; its head is its table of words, and its layers are as large as a BERT's."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=max_positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_inner=4 * width,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        pad_token_id=pad_id,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
    )
    decoder: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return decoder


def make_room(backbone: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """Gives a decoder rows for ids that its tokenizer got later, such as `[MASK]` and `[PAD]`; the old ones stay.

    They hold random numbers. That does no harm: such ids are never written, and never stand before what is.
    """
    if backbone.config.vocab_size < vocab_size:
        # Not from the mean of the others, which takes a covariance of the whole table and a warning to say so.
        backbone.resize_token_embeddings(vocab_size, mean_resizing=False)
    return backbone


def _at_places(places: Tensor, head: nn.Module, hidden: Tensor) -> Any:
    """Lets the head see the vectors of N places only: [B, L, D] becomes [1, N, D]."""
    return head(hidden.flatten(0, 1).index_select(0, places)[None])


def _name_of_head(backbone: PreTrainedModel) -> str:
    head = backbone.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, child in backbone.named_children():
        if child is head:
            return name
    raise ValueError(f"{type(backbone).__name__} has no head over words: use a *ForCausalLM, such as GPT2LMHeadModel")


def _require_causal(attend: Places, asked: Places) -> None:
    """Refuses what a decoder without a mask would answer wrongly."""
    gaps = attend[:, 1:] & ~attend[:, :-1]
    first_is_asked, has_gaps = torch.stack([asked[:, 0].any(), gaps.any()]).tolist()  # one wait for a GPU, not two
    if first_is_asked:
        raise ValueError(
            "the first place of a row is asked about, but a decoder knows it only from places before: "
            "let rows begin with a token that is not editable, such as [CLS]"
        )
    if has_gaps:
        raise ValueError("padding stands before text, where a decoder would read it: pad rows at their ends")
