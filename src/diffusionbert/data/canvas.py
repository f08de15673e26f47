"""Sequences become batches: padding, sentences by index, lengths drawn from a histogram.

This module does not depend on networks or samplers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch


@final
@dataclass(frozen=True)
class Sentences:
    """Sentences in memory, from which batches are made by index; a sentence's number is the key of its noise."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The tokens of each sentence."""
        return self.vocabulary.encode(self.texts)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens per sentence, including special tokens."""
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Makes a batch in which all tokens but special ones are editable."""
        picked = batch_of(self.vocabulary, [self.sequences[index] for index in indices])
        editable = picked.attention_mask & ~self.vocabulary.special[picked.tokens]
        return replace(picked, editable=editable, example=torch.tensor(indices))


def batch_of(vocabulary: Vocabulary, sequences: Sequence[Sequence[int]]) -> Batch:
    """Pads sequences on the right to one batch without editable positions."""
    tokens = torch.full((len(sequences), max(map(len, sequences), default=0)), vocabulary.pad_id)
    attention_mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        tokens[index, : len(sequence)] = torch.tensor(sequence)
        attention_mask[index, : len(sequence)] = True
    return Batch.of(tokens, torch.zeros_like(attention_mask), attention_mask)


def drawn_lengths(histogram: Tensor, num_sequences: int, seed: int, shortest: int = 1) -> list[int]:
    """Draws lengths of at least `shortest` from the training corpus's length histogram."""
    weights = histogram.double().clone()
    weights[:shortest] = 0
    if not float(weights.sum()) > 0:
        raise ValueError(f"the training corpus has no sequence of {shortest} or more tokens; give `length`")
    cumulative = weights.cumsum(dim=0)
    uniform = Noise(seed).uniform(torch.arange(num_sequences), Purpose.LENGTH)
    lengths: list[int] = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).tolist()
    return lengths
