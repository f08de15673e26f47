"""Canvases: what is given and what is to be written, as a `Batch`.

A canvas is rows of tokens of which the editable ones are to be written. Nothing given, a prompt, blanks, a sentence to
be rewritten and a source to be answered differ only in which places those are. Strings stop here.
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

from diffusionbert.noise import Noise, Purpose
from diffusionbert.reading import Pair
from diffusionbert.shapes import Batch
from diffusionbert.vocabulary import Vocabulary

BLANK = "[BLANK]"
"""Stands for a gap of unknown length, as the mask token stands for one token."""


def blank(vocabulary: Vocabulary, lengths: Sequence[int], prompt: str = "", source: str | None = None) -> Batch:
    """Rows with nothing but a prompt: `lengths` count the tokens of each sentence, those of the prompt included.

    With a source, the sentence is a pair's target.
    """
    frame = _encoded(vocabulary, prompt, source)
    num_given = len(frame) - len(_encoded(vocabulary, "", source))
    short = min(lengths, default=num_given + 1)
    if short <= num_given:
        raise ValueError(
            f"a sentence of {short} tokens has no room for anything beside {prompt!r}, which has {num_given}; "
            f"ask for a length of {num_given + 1} or more"
            if num_given
            else f"a sentence must have at least 1 token, asked for {short}"
        )
    end = _end(vocabulary, frame)
    rows = [[*frame[:end], *[vocabulary.mask_id] * (length - num_given), *frame[end:]] for length in lengths]
    canvas = batch_of(vocabulary, rows)
    return replace(canvas, editable=canvas.attend & (canvas.tokens == vocabulary.mask_id))


def blanks(vocabulary: Vocabulary, text: str, gap: int = 0) -> Batch:
    """One row in which the mask tokens of a text are to be written; each `[BLANK]` becomes so many of them."""
    mask = str(vocabulary.tokenizer.mask_token)
    text = text.replace(BLANK, " ".join([mask] * gap))
    [row] = vocabulary.encode([text], marked=True)
    canvas = batch_of(vocabulary, [row])
    forged = int(vocabulary.special[row].sum()) - vocabulary.num_special(paired=False) - row.count(vocabulary.mask_id)
    if forged:
        raise ValueError(f"{text!r} contains special tokens other than {mask}; write them in another way")
    return replace(canvas, editable=canvas.tokens == vocabulary.mask_id)


def rewriting(vocabulary: Vocabulary, text: str, strength: float, num_rows: int, seed: int) -> Batch:
    """Rows of one sentence, in each of which another share of the tokens, drawn at random, is to be written anew."""
    if not 0 < strength <= 1:
        raise ValueError(f"the strength of a rewriting must lie in (0, 1], given {strength}; 0.4 hides 40 %")
    canvas = Sentences(vocabulary, (text,) * num_rows).batch(range(num_rows))
    count = int(canvas.editable[0].sum())
    if not count:
        raise ValueError(f"there is nothing to rewrite in {text!r}; give a sentence")
    order = Noise(seed).uniform(canvas.example, Purpose.ORDER, canvas.tokens.shape[1])
    rank = order.masked_fill(~canvas.editable, torch.inf).argsort(dim=1).argsort(dim=1)
    return replace(canvas, editable=canvas.editable & (rank < max(1, round(strength * count))))


@final
@dataclass(frozen=True)
class Sentences:
    """Whole sentences in memory, of which any may be picked; each is named by its number."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]

    @cached_property
    def rows(self) -> list[list[int]]:
        """The tokens of each."""
        return self.vocabulary.encode(self.texts)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens in each, special ones included."""
        return np.fromiter(map(len, self.rows), np.int64, len(self.rows))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Puts sentences side by side; their own tokens are editable."""
        picked = batch_of(self.vocabulary, [self.rows[index] for index in indices])
        editable = picked.attend & ~self.vocabulary.special[picked.tokens]
        return replace(picked, editable=editable, example=torch.tensor(indices))


def batch_of(vocabulary: Vocabulary, rows: Sequence[Sequence[int]]) -> Batch:
    """Rows side by side, padded; nothing is editable yet."""
    tokens = torch.full((len(rows), max(map(len, rows), default=0)), vocabulary.pad_id)
    attend = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        attend[index, : len(row)] = True
    return Batch.of(tokens, torch.zeros_like(attend), attend)


def drawn_lengths(histogram: Tensor, num_rows: int, seed: int, shortest: int = 1) -> list[int]:
    """Lengths as the training corpus has them, none under `shortest`."""
    weights = histogram.double().clone()
    weights[:shortest] = 0
    if not float(weights.sum()) > 0:
        raise ValueError(f"the training corpus has no sentence of {shortest} or more tokens; give a length")
    cumulative = weights.cumsum(dim=0)
    uniform = Noise(seed).uniform(torch.arange(num_rows), Purpose.LENGTH)
    lengths: list[int] = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).tolist()
    return lengths


def _encoded(vocabulary: Vocabulary, text: str, source: str | None) -> list[int]:
    [row] = vocabulary.encode([text]) if source is None else vocabulary.encode_pairs([Pair(source, text)])
    return row


def _end(vocabulary: Vocabulary, row: list[int]) -> int:
    """Where the editable part of a row ends: before its last special token."""
    return max(place for place, token in enumerate(row) if vocabulary.special[token])
