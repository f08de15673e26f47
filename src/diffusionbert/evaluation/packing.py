"""Running text as full sequences, for the packed convention of the LM1B literature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionbert.data.canvas import batch_of
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch


@final
@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Full sequences of running text: sentences are concatenated and cut wherever a sequence is full; the rest is
    dropped.

    Nothing separates the sentences, because a model of single sentences cannot generate `[SEP]`.
    """

    vocabulary: Vocabulary
    texts: Sequence[str]
    positions: int
    """Tokens of a sequence, special ones included."""

    @cached_property
    def rows(self) -> list[list[int]]:
        """The tokens of each sequence, with the tokenizer's special tokens around them."""
        special = self.vocabulary.special
        framed = self.vocabulary.encode(self.texts)
        running = [token for row in framed for token in row if not special[token]]
        room = self.positions - self.vocabulary.num_special(paired=False)
        own = [position for position, token in enumerate(framed[0]) if not special[token]]
        before, after = framed[0][: own[0]], framed[0][own[-1] + 1 :]
        starts = range(0, len(running) - room + 1, room)
        return [[*before, *running[start : start + room], *after] for start in starts]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """All equal."""
        return np.full(len(self.rows), self.positions, np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """A batch in which everything but the special tokens is editable."""
        picked = batch_of(self.vocabulary, [self.rows[index] for index in indices])
        editable = ~self.vocabulary.special[picked.tokens]
        return replace(picked, editable=editable, example=torch.tensor(indices))
