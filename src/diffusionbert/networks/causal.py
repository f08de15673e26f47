"""Causal networks: log p(x_i | x_1 … x_{i-1}) from any Hugging Face `*ForCausalLM` (Vaswani et al. 2017; Radford et al.
2019).

A token is predicted at the position before it, so the first position of a sequence has no prediction. Padding comes at
the end and a decoder never attends to the right: no mask is passed, and attention runs in its fused causal kernel.

Token ids come in and log-probabilities go out: this module knows nothing about strings, noise or losses.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, PreTrainedModel

from diffusionbert.networks.base import attention_kernels, distribution, padded_writable, require_length
from diffusionbert.networks.heads import head_of, logits_at
from diffusionbert.shapes import AskedLogProbs, AskedRows, Places, Tokens, TokenSet


@runtime_checkable
class Reader(Protocol):
    """Sequences that are read from left to right, part by part, and the distribution of what comes next."""

    def read(self, tokens: Tokens) -> AskedLogProbs:
        """Reads the next tokens of every sequence; returns the distribution of the token that follows each."""

    def keep(self, rows: AskedRows) -> None:
        """Continues with these sequences alone."""


@runtime_checkable
class CausalNetwork(Protocol):
    """A network that predicts tokens from left to right."""

    def __call__(self, tokens: Tokens, attend: Places, asked: Places) -> AskedLogProbs:
        """Returns log p(v | x_<i) at the N target positions i: a distribution over allowed tokens, −∞ at all others."""

    def begin(self) -> Reader:
        """Starts new sequences, of which nothing is read yet."""


@final
class CausalModel(nn.Module):
    """A decoder that predicts at target positions only.

    `writable` marks the allowed tokens. Where the model's vocabulary is larger than the tokenizer's, the ids beyond are
    padding and never allowed.

    Nothing about a call is stored: threads may call one network at the same time.
    """

    writable: TokenSet

    def __init__(self, backbone: PreTrainedModel, writable: TokenSet) -> None:
        super().__init__()
        if backbone.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
            raise ValueError(
                f"{type(backbone).__name__} has no output head: use a *ForCausalLM, such as GPT2LMHeadModel"
            )
        self.backbone = backbone
        self._head = head_of(backbone)
        # Not persistent: it belongs to the vocabulary and is no parameter.
        self.register_buffer("writable", padded_writable(writable, backbone.config.vocab_size), persistent=False)

    @property
    def max_length(self) -> int:
        """The number of positions a sequence may have."""
        # Models without position embeddings, such as BLOOM, have no limit.
        return int(getattr(self.backbone.config, "max_position_embeddings", sys.maxsize))

    def forward(self, tokens: Tokens, attend: Places, asked: Places) -> AskedLogProbs:
        """Returns log p(v | x_<i) at the target positions i, in float32 or better."""
        require_length(tokens.shape[1], self.max_length)
        _require_causal(attend, asked)
        positions = functional.pad(asked[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
        return self.log_probs(tokens, positions, use_cache=False)

    def begin(self) -> Reader:
        """Starts sequences whose keys and values are cached, so that each token is read once."""
        return _CachedReader(self)

    def log_probs(self, tokens: Tokens, positions: AskedRows, **options: Any) -> AskedLogProbs:
        """Returns the distribution of what follows these positions, numbered through all sequences."""
        # Vectors and not ids, in which transformers would look for padding and warn that no mask is given.
        words = self.backbone.get_input_embeddings()(tokens)
        with attention_kernels():
            logits = logits_at(
                positions,
                self.backbone,
                self._head,
                lambda model: model(inputs_embeds=words, return_dict=True, **options),
            )
        return distribution(logits, self.writable)


@final
class _CachedReader:
    """Reads with a cache of keys and values (`DynamicCache`)."""

    def __init__(self, network: CausalModel) -> None:
        self._network = network
        self._cache = DynamicCache(config=network.backbone.config)
        self._num_read = 0

    def read(self, tokens: Tokens) -> AskedLogProbs:
        """Reads the next tokens of every sequence; returns the distribution of the token that follows each."""
        num_sequences, length = tokens.shape
        if not length:
            raise ValueError("there is nothing to read: give at least one token per sequence")
        self._num_read += length
        require_length(self._num_read, self._network.max_length)
        last = torch.arange(1, num_sequences + 1, device=tokens.device) * length - 1
        return self._network.log_probs(tokens, last, past_key_values=self._cache, use_cache=True)

    def keep(self, rows: AskedRows) -> None:
        """Drops all other sequences."""
        self._cache.batch_select_indices(rows)


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
    """Makes a randomly initialised GPT-2 with tied embeddings; its layers have the size of a BERT's."""
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
    """Adds embeddings for ids that a decoder's tokenizer got later, such as `[MASK]` and `[PAD]`; the old ones stay.

    They are random, which does no harm: such tokens are never allowed, and never come before a target position.
    """
    if backbone.config.vocab_size < vocab_size:
        # Not from the mean of the others, which computes a covariance of the whole table and warns about it.
        backbone.resize_token_embeddings(vocab_size, mean_resizing=False)
    return backbone


def _require_causal(attend: Places, asked: Places) -> None:
    """Refuses what a decoder without a mask would get wrong."""
    gaps = attend[:, 1:] & ~attend[:, :-1]
    first_is_asked, has_gaps = torch.stack([asked[:, 0].any(), gaps.any()]).tolist()  # one synchronisation, not two
    if first_is_asked:
        raise ValueError(
            "the first position of a sequence is a target, but a decoder predicts from the positions before it: "
            "begin sequences with a token that is not editable, such as [CLS]"
        )
    if has_gaps:
        raise ValueError("padding comes before text, where a decoder would attend to it: pad sequences at the end")
