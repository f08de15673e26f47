"""What networks are asked, and what all of them have in common."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel

from diffusionbert.shapes import AskedLogProbs, Batch, Places, RowTimes, Tokens, TokenSet

# Not cuDNN's: it makes a plan for each new shape, a tenth of a second long, and nearly every batch has its own shape.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@runtime_checkable
class Network(Protocol):
    """What every objective and sampler on tokens asks: which words may stand at these places, at this time?"""

    def __call__(self, tokens: Tokens, attend: Places, t: RowTimes, asked: Places) -> AskedLogProbs:
        """Gives log f(v | x_t) at the N asked places: a distribution over writable tokens, −∞ at all others."""


class Backed(Protocol):
    """What every network of the package is: a Hugging Face model, and perhaps some weights beside it.

    For type checkers alone: since Python 3.12 `isinstance` with a protocol does not see a module's own modules.
    """

    backbone: PreTrainedModel

    @property
    def writable(self) -> TokenSet:
        """Ids that may be written, over all ids that the backbone knows."""

    @property
    def max_length(self) -> int:
        """The number of places a row may have."""


def ask(network: Network, x_t: Batch, t: RowTimes, asked: Places) -> AskedLogProbs:
    """Asks about marked places; rows without any are not sent."""
    rows = asked.any(dim=1).nonzero()[:, 0]
    sent = x_t.rows(rows)
    return network(sent.tokens, sent.attend, t[rows], asked[rows, : sent.tokens.shape[1]])


def distribution(logits: Tensor, writable: TokenSet) -> AskedLogProbs:
    """Log-probabilities over writable ids, in float32 or better; overwrites the logits.

    Logits are most of the memory that a step moves: they are neither copied to another precision nor masked in the
    backward pass, in which a softmax gives ids of probability 0 no gradient anyway.
    """
    with torch.no_grad():
        logits.masked_fill_(~writable, -torch.inf)
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def padded_writable(writable: TokenSet, vocab_size: int) -> Tensor:
    """The same over all ids that a backbone knows; those beyond the tokenizer's are padding and never written."""
    if not writable.any():
        raise ValueError("no token may be written: mark at least one id that is not special")
    if len(writable) > vocab_size:
        raise ValueError(
            f"the writable tokens go up to id {len(writable) - 1}, but the network knows {vocab_size} ids: "
            "use the tokenizer it was trained with, or resize its embeddings"
        )
    padded = writable.new_zeros(vocab_size)
    padded[: len(writable)] = writable
    return padded


def num_reserved_positions(backbone: PreTrainedModel) -> int:
    """Counts the positions that RoBERTa's kin keep for padding: up to and with their padding index."""
    for name, module in backbone.base_model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
