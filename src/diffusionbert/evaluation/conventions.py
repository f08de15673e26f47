"""Reports one checkpoint in every convention of the LM1B literature, to compare it with any paper's table.

Papers divide different nats by different counts and call all of them perplexity. Sentence i has n_i tokens, w_i words,
b_i bytes, and X_i nats given its length:

    per word                 exp(Σ X_i / Σ w_i)             DiffusionBERT (He et al. 2022), T-step bound
    per token                exp(Σ X_i / Σ n_i)             single sentences
    per token, padded        exp(Σ X_i / Σ (n_i + 2))       MDLM (Sahoo et al. 2024) on LM1B that is not wrapped
    per token, packed        exp(Σ Y_j / Σ m_j)             MDLM on wrapped LM1B: Y_j, m_j of full sequences
    per token, with length   exp(Σ (X_i - log p(n_i)) / Σ n_i)
    per byte (bits)          Σ X_i / Σ b_i / log 2          comparable across vocabularies

MDLM's published code pads sequences to 128 tokens and lets the network see pads, which are masked like other tokens. It
multiplies the loss by the tokenizer's attention mask and divides by the sum of that mask: [CLS] and [SEP] are counted,
pads are not, and an unmasked pad reveals the length. Here the length is given, so [CLS] and [SEP] cost nothing, but are
still counted. This module only divides numbers; nats are estimated in `likelihood.estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.canvas import batch_of
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch, PerSequence
from diffusionbert.likelihood.intervals import ratio_intervals
from diffusionbert.likelihood.scores import Estimate, PointEstimate, Rate, bits_of, perplexity_of
from diffusionbert.objectives.base import Likelihood, LikelihoodDefinition

PACKED_LENGTH = 128
"""The number of tokens of a packed sequence in the LM1B literature, including special tokens."""
_SINGLE = "Σ nats of single sentences, length given"


class ConventionScale(Enum):
    """What nats per unit are converted into."""

    PERPLEXITY = "perplexity"
    BITS = "bits"


@dataclass(frozen=True)
class Meaning:
    """What a convention is, in words."""

    name: str
    papers: str
    quotient: str
    """What is divided by what."""
    note: str
    """What it can be compared with."""
    scale: ConventionScale = ConventionScale.PERPLEXITY
    trained_for: bool = True
    """Whether the checkpoint was trained on text of this form."""


@final
@dataclass(frozen=True)
class Convention:
    """A likelihood as one part of the literature reports it."""

    meaning: Meaning
    kind: Likelihood
    definition: LikelihoodDefinition
    value: PointEstimate | None
    """None if it is infinite or not available; the note says which."""


def conventions(
    own: Estimate,
    grid: Estimate,
    continuous: Estimate,
    packed: Estimate | None,
    length_nats: PerSequence | None,
    num_special: int,
    vocabulary_size: int,
    seed: int = 0,
) -> tuple[Convention, ...]:
    """All conventions, each with its interval; all estimates are given the length.

    Args:
        own: The model's own likelihood; also used as `grid` or `continuous` if it has no such bound.
        packed: The likelihood of full sequences; None if the sentences do not fill two.
        length_nats: -log p(length) of each sentence; None if the model has no length histogram.
    """
    vocabulary = (
        f"comparable under one vocabulary only: {vocabulary_size:,} tokens here, bert-base-uncased's 30,522 in "
        "the papers"
    )
    per_word = Meaning(
        "per word",
        "DiffusionBERT (He et al. 2022) and its baselines",
        f"{_SINGLE} / Σ whitespace-separated words",
        "comparable across vocabularies if words are split alike: LM1B's tokenized text has more of them than plain "
        "text; the published spindle figures are not bounds",
    )
    per_token = Meaning("per token", "single sentences", f"{_SINGLE} / Σ tokens without special ones", vocabulary)
    padded = Meaning(
        "per token, padded",
        "MDLM (Sahoo et al. 2024), with SEDD and AR beside it, on LM1B not wrapped",
        f"{_SINGLE} / Σ (tokens + {num_special}): special tokens are counted at no cost, pads are not",
        f"there [SEP] must be generated, at some cost unless a pad is unmasked; {vocabulary}",
    )
    wrapped = Meaning(
        "per token, packed",
        "MDLM and BD3-LM on LM1B wrapped; D3PM, with 8k SentencePiece",
        "Σ nats of full sequences of concatenated sentences / Σ tokens without special ones",
        "this checkpoint was not trained on such sequences; in the papers [SEP] separates sentences and counts; "
        f"{vocabulary}",
        trained_for=False,
    )
    with_length = Meaning(
        "per token, with length",
        "models that generate an end token, such as autoregressive ones",
        "Σ (nats of single sentences - log p(length)) / Σ tokens without special ones",
        f"p(length) is the histogram of the training corpus; {vocabulary}",
    )
    per_byte = Meaning(
        "per byte",
        "any vocabulary",
        f"{_SINGLE} / Σ UTF-8 bytes of the text as read / log 2",
        "comparable across vocabularies on the same text, cased and cleaned alike",
        scale=ConventionScale.BITS,
    )
    return (
        _convention(per_word, grid, grid.scores.words, seed),
        _convention(per_token, own, own.scores.tokens, seed),
        _convention(padded, continuous, continuous.scores.tokens + num_special, seed),
        _missing(wrapped, continuous, "the sentences do not fill two sequences")
        if packed is None
        else _convention(wrapped, packed, packed.scores.tokens, seed),
        _missing(with_length, own, "this model has no length histogram")
        if length_nats is None
        else _convention(with_length, own, own.scores.tokens, seed, length_nats),
        _convention(per_byte, own, own.scores.bytes, seed),
    )


def _convention(
    meaning: Meaning, estimate: Estimate, counts: Tensor | None, seed: int, more_nats: Tensor | float = 0.0
) -> Convention:
    assert counts is not None, "conventions need the words and bytes of each sentence"
    nats, numbers = (estimate.scores.nats + more_nats).numpy(), counts.double().numpy()
    [interval] = ratio_intervals(nats, [numbers], seed)
    rate = Rate(float(nats.sum() / numbers.sum()), *interval)
    value = rate.estimate(bits_of if meaning.scale is ConventionScale.BITS else perplexity_of)
    if not math.isfinite(value.value) or value.ci95 is None or not math.isfinite(value.ci95[1]):
        return _missing(meaning, estimate, "infinite: some sentence is (nearly) impossible under this model")
    return Convention(meaning, estimate.kind, estimate.protocol.definition, value)


def _missing(meaning: Meaning, estimate: Estimate, reason: str) -> Convention:
    noted = replace(meaning, note=f"not available: {reason}")
    return Convention(noted, estimate.kind, estimate.protocol.definition, None)


@final
@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Running text as full sequences: sentences are concatenated and cut wherever a sequence is full.

    An incomplete last sequence is dropped. Nothing separates the sentences, because a model of single sentences cannot
    generate `[SEP]`.
    """

    vocabulary: Vocabulary
    texts: Sequence[str]
    positions: int
    """The number of tokens per sequence, including special ones."""

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The tokens of each sequence, with the tokenizer's special tokens around them."""
        special, framed = self.vocabulary.special, self.vocabulary.encode(self.texts)
        running = [token for sentence in framed for token in sentence if not special[token]]
        own = [position for position, token in enumerate(framed[0]) if not special[token]]
        before, after = framed[0][: own[0]], framed[0][own[-1] + 1 :]
        room = self.positions - len(before) - len(after)
        starts = range(0, len(running) - room + 1, room)
        return [[*before, *running[start : start + room], *after] for start in starts]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens per sequence, the same for all."""
        return np.full(len(self.sequences), self.positions, np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Makes a batch in which everything except the special tokens is editable."""
        picked = batch_of(self.vocabulary, [self.sequences[index] for index in indices])
        return replace(picked, editable=~self.vocabulary.special[picked.tokens], example=torch.tensor(indices))
