"""Canvases: what is given and what is to be written, as a `Batch`.

A canvas is rows of tokens of which the editable ones are to be written. Nothing given, a prompt, blanks, a sentence to
be rewritten and a source to be answered differ only in which places those are. Strings stop here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.noise import Noise, Purpose
from diffusionbert.shapes import Batch
from diffusionbert.text.reading import Pair
from diffusionbert.text.vocabulary import Vocabulary

MASK = "[MASK]"
"""Stands for one token, however a vocabulary writes its own."""
BLANK = "[BLANK]"
"""Stands for a gap of unknown length, as the mask token stands for one token."""


def blank(vocabulary: Vocabulary, lengths: Sequence[int], prompt: str = "", source: str | None = None) -> Batch:
    """Rows with nothing but a prompt: `lengths` count the tokens of each sentence, those of the prompt included.

    With a source, the sentence is a pair's target.
    """
    frame = _encoded(vocabulary, prompt, source)
    num_given = num_tokens(vocabulary, prompt)
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


@final
@dataclass(frozen=True)
class Blanks:
    """A text with blanks: `[MASK]` for one token, `[BLANK]` for any number of them."""

    vocabulary: Vocabulary
    text: str

    def __post_init__(self) -> None:
        if not self.marks:
            raise ValueError(
                f"there is nothing to fill in {self.text!r}; write {MASK} for one token, {BLANK} for any number"
            )

    @property
    def mask(self) -> str:
        """How this vocabulary writes its mask token."""
        return str(self.vocabulary.tokenizer.mask_token)

    @cached_property
    def parts(self) -> list[str]:
        """The text between blanks and the blanks, in turn; the first and the last are text."""
        return re.split(f"({re.escape(self.mask)}|{re.escape(MASK)}|{re.escape(BLANK)})", self.text)

    @property
    def marks(self) -> list[str]:
        """The blanks."""
        return self.parts[1::2]

    def canvas(self, gap: int = 1) -> Batch:
        """One row in which the blanks are to be written, each `[BLANK]` having so many tokens."""
        marks = [" ".join([self.mask] * width) for width in self._widths(gap)]
        parts = [*itertools.chain(*zip(self.parts[::2], marks, strict=False)), self.parts[-1]]
        [row] = self.vocabulary.encode(["".join(parts)], marked=True)
        num_hidden = sum(self._widths(gap))
        if int(self.vocabulary.special[row].sum()) != self.vocabulary.num_special(paired=False) + num_hidden:
            raise ValueError(f"{self.text!r} contains special tokens besides {self.mask}; write them in another way")
        canvas = batch_of(self.vocabulary, [row])
        return replace(canvas, editable=canvas.tokens == self.vocabulary.mask_id)

    def filled(self, tokens: Sequence[int], gap: int = 1) -> tuple[str, tuple[str, ...]]:
        """The given text with the blanks replaced by these tokens, one after another, and what stands in each."""
        text, fillings, start = self.parts[0], [], 0
        for width, after in zip(self._widths(gap), self.parts[2::2], strict=True):
            run = tokens[start : start + width]
            start += width
            filling = self.vocabulary.decode(run).strip().removeprefix("##")
            if self.vocabulary.continuation[run[0]]:
                text = text.rstrip()
            elif text[-1:].isalnum():  # no blank stands around the mark
                text += " "
            text += filling + (" " if filling[-1:].isalnum() and after[:1].isalnum() else "") + after
            fillings.append(filling)
        return text, tuple(fillings)

    def _widths(self, gap: int) -> list[int]:
        return [gap if mark == BLANK else 1 for mark in self.marks]


def rewriting(
    vocabulary: Vocabulary, text: str, strength: float, num_rows: int, seed: int, unwanted: Sequence[str] = ()
) -> Batch:
    """Rows of one sentence, in each of which another share of the tokens, drawn at random, is to be written anew.

    Unwanted words are always among them, and all rows have equally many: samplers start where the share says.
    """
    if not 0 < strength <= 1:
        raise ValueError(f"the strength of a rewriting must lie in (0, 1], given {strength}; 0.4 hides 40 %")
    canvas = Sentences(vocabulary, (text,) * num_rows).batch(range(num_rows))
    count = int(canvas.editable[0].sum())
    if not count:
        raise ValueError(f"there is nothing to rewrite in {text!r}; give a sentence")
    hidden = torch.zeros_like(canvas.editable)
    for pieces in (torch.tensor(way) for word in unwanted for way in vocabulary.spellings(word)):
        if len(pieces) <= canvas.tokens.shape[1]:
            starts = (canvas.tokens.unfold(1, len(pieces), 1) == pieces).all(dim=2).nonzero()
            for offset in range(len(pieces)):
                hidden[starts[:, 0], starts[:, 1] + offset] = True
    hidden &= canvas.editable
    others = replace(canvas, editable=canvas.editable & ~hidden)
    chosen = Noise(seed).chosen(others, max(1, round(strength * count)) - hidden.sum(dim=1))
    return replace(canvas, editable=hidden | chosen)


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


def num_tokens(vocabulary: Vocabulary, text: str) -> int:
    """The tokens of a text, without special ones."""
    return len(vocabulary.own([text])[0])


def _encoded(vocabulary: Vocabulary, text: str, source: str | None) -> list[int]:
    [row] = vocabulary.encode([text]) if source is None else vocabulary.encode_pairs([Pair(source, text)])
    return row


def _end(vocabulary: Vocabulary, row: list[int]) -> int:
    """Where the editable part of a row ends: before its last special token."""
    return max(place for place, token in enumerate(row) if vocabulary.special[token])
