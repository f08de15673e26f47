"""Makes batches from sequences: padding, sentences by index, lengths drawn from a histogram.

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

from diffusionbert.data.files import Pair
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch


@final
@dataclass(frozen=True)
class Sentences:
    """Sentences in memory, batched by index; a sentence's index is also the key of its noise."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]
    sources: tuple[str, ...] | None = None
    """The source of each sentence, for models trained on pairs."""

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The tokens of each sentence, after its source if there is one."""
        if self.sources is None:
            return self.vocabulary.encode(self.texts)
        return self.vocabulary.encode_pairs([Pair(*pair) for pair in zip(self.sources, self.texts, strict=True)])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens per sentence, including special tokens."""
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Makes a batch in which all tokens except special ones and sources are editable."""
        picked = batch_of(self.vocabulary, [self.sequences[index] for index in indices])
        editable = picked.attention_mask & ~self.vocabulary.special[picked.tokens]
        if self.sources is not None:
            counts = torch.tensor([num_source_tokens(self.vocabulary, self.sequences[index]) for index in indices])
            editable &= editable.cumsum(dim=1) > counts[:, None]
        return replace(picked, editable=editable, example=torch.tensor(indices))


@final
@dataclass(frozen=True)
class Generated:
    """Generated token ids without special tokens, batched by index."""

    vocabulary: Vocabulary
    tokens: Sequence[Sequence[int]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of positions per sequence."""
        return np.fromiter((len(one) + len(self._around[0]) + len(self._around[1]) for one in self.tokens), np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Makes a batch in which all tokens except the special ones around the text are editable."""
        begin, end = self._around
        picked = batch_of(self.vocabulary, [[*begin, *self.tokens[index], *end] for index in indices])
        editable = picked.attention_mask.clone()
        for row, index in enumerate(indices):
            editable[row, : len(begin)] = False
            editable[row, len(begin) + len(self.tokens[index]) :] = False
        return replace(picked, editable=editable, example=torch.tensor(indices))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        [sequence] = self.vocabulary.encode(["a"])
        own = [index for index, token in enumerate(sequence) if not self.vocabulary.special[token]]
        return sequence[: own[0]], sequence[own[-1] + 1 :]


def num_source_tokens(vocabulary: Vocabulary, sequence: Sequence[int]) -> int:
    """The number of source tokens in an encoded pair.

    The target lies between the last two special tokens; all other tokens that are not special belong to the source.
    """
    special = [position for position, token in enumerate(sequence) if vocabulary.special[token]]
    return special[-2] + 1 - (len(special) - 1)


def batch_of(vocabulary: Vocabulary, sequences: Sequence[Sequence[int]]) -> Batch:
    """Pads sequences on the right into one batch without editable positions."""
    tokens = torch.full((len(sequences), max(map(len, sequences), default=0)), vocabulary.pad_id)
    attention_mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        tokens[index, : len(sequence)] = torch.tensor(sequence)
        attention_mask[index, : len(sequence)] = True
    return Batch.of(tokens, torch.zeros_like(attention_mask), attention_mask)


def target_histogram(table: Tensor, num_source: int, least: int = 20) -> Tensor:
    """The length histogram of targets whose sources have about `num_source` tokens.

    Args:
        table: Rows (source tokens, target tokens, number of pairs), as returned by `dataset.source_lengths`.
        num_source: The number of source tokens.
        least: Pairs with ever more distant source lengths are included until there are this many, or no more.
    """
    distance = (table[:, 0] - num_source).abs()
    totals = torch.zeros(int(distance.max()) + 1, dtype=torch.long).index_add_(0, distance, table[:, 2]).cumsum(dim=0)
    enough = int((totals < min(least, int(totals[-1]))).sum())
    near = table[distance <= enough]
    return torch.zeros(int(table[:, 1].max()) + 1, dtype=torch.long).index_add_(0, near[:, 1], near[:, 2])


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
