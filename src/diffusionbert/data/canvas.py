"""Canvases: batches whose editable positions are to be generated.

Unconditional generation, a prompt, blanks, a sentence to rewrite and a source sentence differ only in which positions
are editable. This module does not depend on networks or samplers.
"""

from __future__ import annotations

import hashlib
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

from diffusionbert.data.files import Pair
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch

MASK = "[MASK]"
"""Marks one token, whatever the vocabulary's own mask token looks like."""
BLANK = "[BLANK]"
"""Marks a gap of unknown length."""


def blank(vocabulary: Vocabulary, lengths: Sequence[int], prompt: str = "", source: str | None = None) -> Batch:
    """Makes one masked sequence per length, after an optional prompt.

    Args:
        vocabulary: Encodes the prompt and the source.
        lengths: The number of tokens per sequence, including the prompt and excluding special tokens.
        prompt: The text with which each sequence begins; not editable.
        source: With a source, each sequence is the target of a pair.
    """
    frame = _encode(vocabulary, prompt, source)
    num_given = num_tokens(vocabulary, prompt)
    shortest = min(lengths, default=num_given + 1)
    if shortest <= num_given:
        if not num_given:
            raise ValueError(f"`length` must be >= 1 token, got {shortest}")
        raise ValueError(
            f"`length` must be >= {num_given + 1} with a prompt of {num_given} tokens ({prompt[:40]!r}), "
            f"got {shortest}; raise it, or shorten the prompt"
        )
    end = _end_of_text(vocabulary, frame)
    canvas = batch_of(
        vocabulary,
        [[*frame[:end], *[vocabulary.mask_id] * (length - num_given), *frame[end:]] for length in lengths],
    )
    return replace(canvas, editable=canvas.attend & (canvas.tokens == vocabulary.mask_id))


@final
@dataclass(frozen=True)
class Blanks:
    """A text with blanks: `[MASK]` for one token, `[BLANK]` for any number of tokens."""

    vocabulary: Vocabulary
    text: str

    def __post_init__(self) -> None:
        if not self.marks:
            raise ValueError(
                f"nothing to fill in {self.text[:40]!r}; use {MASK} for one token, {BLANK} for any number of tokens"
            )

    @property
    def mask(self) -> str:
        """The vocabulary's own mask token."""
        return str(self.vocabulary.tokenizer.mask_token)

    @cached_property
    def parts(self) -> list[str]:
        """Text and blanks alternately; the first and last elements are text."""
        return re.split(f"({re.escape(self.mask)}|{re.escape(MASK)}|{re.escape(BLANK)})", self.text)

    @property
    def marks(self) -> list[str]:
        """The blanks."""
        return self.parts[1::2]

    def canvas(self, gap: int = 1) -> Batch:
        """Makes one sequence whose blanks are editable, with `gap` tokens for each `[BLANK]`."""
        widths = self._widths(gap)
        marks = [" ".join([self.mask] * width) for width in widths]
        parts = [*itertools.chain(*zip(self.parts[::2], marks, strict=False)), self.parts[-1]]
        [tokens] = self.vocabulary.encode(["".join(parts)], marked=True)
        if int(self.vocabulary.special[tokens].sum()) != self.vocabulary.num_special(paired=False) + sum(widths):
            raise ValueError(
                f"the text must not contain special tokens other than {self.mask}, got {self.text[:40]!r}; remove them"
            )
        canvas = batch_of(self.vocabulary, [tokens])
        return replace(canvas, editable=canvas.tokens == self.vocabulary.mask_id)

    def filled(self, tokens: Sequence[int], gap: int = 1) -> tuple[str, tuple[str, ...]]:
        """Returns the text with its blanks replaced by these tokens, in order, and the filling of each blank."""
        text, fillings, start = self.parts[0], [], 0
        for width, after in zip(self._widths(gap), self.parts[2::2], strict=True):
            chosen = tokens[start : start + width]
            start += width
            filling = self.vocabulary.decode(chosen).strip().removeprefix("##")
            if self.vocabulary.continuation[chosen[0]]:
                text = text.rstrip()
            elif text[-1:].isalnum():  # no space before the mark
                text += " "
            text += filling + (" " if filling[-1:].isalnum() and after[:1].isalnum() else "") + after
            fillings.append(filling)
        return text, tuple(fillings)

    def _widths(self, gap: int) -> list[int]:
        return [gap if mark == BLANK else 1 for mark in self.marks]


def rewriting(
    vocabulary: Vocabulary, text: str, strength: float, num_sequences: int, seed: int, unwanted: Sequence[str] = ()
) -> Batch:
    """Makes copies of a sentence, each with another random fraction `strength` of its tokens editable.

    Unwanted words are always editable. All sequences have equally many editable positions, because samplers start at
    the time that corresponds to this fraction.
    """
    if not 0 < strength <= 1:
        raise ValueError(f"`strength` must be in (0, 1], got {strength}; 0.4 masks 40 % of the tokens")
    canvas = Sentences(vocabulary, (text,) * num_sequences).batch(range(num_sequences))
    count = int(canvas.editable[0].sum())
    if not count:
        raise ValueError(f"nothing to rewrite in {text[:40]!r}; give a sentence")
    required = torch.zeros_like(canvas.editable)
    for pieces in (torch.tensor(spelling) for word in unwanted for spelling in vocabulary.spellings(word)):
        if len(pieces) <= canvas.tokens.shape[1]:
            starts = (canvas.tokens.unfold(1, len(pieces), 1) == pieces).all(dim=2).nonzero()
            for offset in range(len(pieces)):
                required[starts[:, 0], starts[:, 1] + offset] = True
    required &= canvas.editable
    others = replace(canvas, editable=canvas.editable & ~required)
    chosen = Noise(seed).chosen(others, max(1, round(strength * count)) - required.sum(dim=1))
    return replace(canvas, editable=required | chosen)


@final
@dataclass(frozen=True)
class Sentences:
    """Sentences in memory, from which batches are made by index."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]
    keys: tuple[int, ...] | None = None
    """Identify the texts, and so their noise; None numbers them."""

    def keyed_by_content(self) -> Sentences:
        """The same texts, whose noise depends on their own tokens and not on their number."""
        hashes = (hashlib.blake2b(repr(tokens).encode(), digest_size=7).digest() for tokens in self.sequences)
        return replace(self, keys=tuple(int.from_bytes(one, "big") for one in hashes))

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
        editable = picked.attend & ~self.vocabulary.special[picked.tokens]
        return replace(
            picked,
            editable=editable,
            example=torch.tensor([index if self.keys is None else self.keys[index] for index in indices]),
        )


def batch_of(vocabulary: Vocabulary, sequences: Sequence[Sequence[int]]) -> Batch:
    """Pads sequences on the right to one batch without editable positions."""
    tokens = torch.full((len(sequences), max(map(len, sequences), default=0)), vocabulary.pad_id)
    attend = torch.zeros_like(tokens, dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        tokens[index, : len(sequence)] = torch.tensor(sequence)
        attend[index, : len(sequence)] = True
    return Batch.of(tokens, torch.zeros_like(attend), attend)


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


def num_tokens(vocabulary: Vocabulary, text: str) -> int:
    """Counts the tokens of a text, excluding special tokens."""
    return len(vocabulary.own([text])[0])


def _encode(vocabulary: Vocabulary, text: str, source: str | None) -> list[int]:
    [tokens] = vocabulary.encode([text]) if source is None else vocabulary.encode_pairs([Pair(source, text)])
    return tokens


def _end_of_text(vocabulary: Vocabulary, tokens: list[int]) -> int:
    """The position of the last special token, which follows the editable part."""
    return max(position for position, token in enumerate(tokens) if vocabulary.special[token])
