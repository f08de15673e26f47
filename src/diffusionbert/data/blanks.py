"""Texts with blanks: `[MASK]` stands for one token, `[BLANK]` for any number of them.

The character before a blank decides what its first token may be. After white space or at the start of the text the
blank begins a word, so continuation tokens are excluded (`word_starts`); right after a letter it continues that word,
so only continuation tokens are allowed (`word_continuations`). Text right after a blank is encoded as the continuation
of a word: `un[MASK]able` becomes `un [MASK] ##able`.

**Long texts.** A text longer than the model can read is processed in windows. Blanks are taken from left to right, and
those within half a window of each other are filled jointly. A window is as long as the model can read, with equal
context on both sides of its blanks (at the ends of the text, more on the other side). In it, blanks of earlier windows
are already filled and blanks of later ones are masked, with one token per `[BLANK]`. This module does not depend on
networks or samplers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

from diffusionbert.data.canvas import batch_of
from diffusionbert.data.letter_case import with_capitals
from diffusionbert.data.text import BLANK, MASK, blank_marks
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch, PositionMask


@final
@dataclass(frozen=True, eq=False)
class BlankCanvas:
    """A sequence whose blanks are editable, with the rules for their first tokens."""

    batch: Batch
    word_starts: PositionMask
    """Positions that must not get a continuation token, [1, L]."""
    word_continuations: PositionMask
    """Positions that must get a continuation token, [1, L]."""


@final
@dataclass(frozen=True)
class Blanks:
    """A text with blanks."""

    vocabulary: Vocabulary
    text: str

    def __post_init__(self) -> None:
        if not self.marks:
            raise ValueError(
                f"nothing to fill in {self.text[:40]!r}; use {MASK} for one token, {BLANK} for any number of tokens"
            )
        special = [str(token) for token in self.vocabulary.tokenizer.all_special_tokens]
        unknown = str(self.vocabulary.tokenizer.unk_token)
        if any(token in part for part in self.parts for token in special if token != unknown):
            raise ValueError(
                f"the text must not contain special tokens other than {self.vocabulary.tokenizer.mask_token}, "
                f"got {self.text[:40]!r}; remove them"
            )

    @cached_property
    def _found(self) -> list[tuple[int, int]]:
        """The start and end of each blank."""
        return [match.span() for match in blank_marks(self.vocabulary).finditer(self.text)]

    @cached_property
    def marks(self) -> list[str]:
        """The blanks as written in the text."""
        return [self.text[start:end] for start, end in self._found]

    @cached_property
    def parts(self) -> list[str]:
        """The text before, between and after the blanks."""
        edges = [0, *(edge for span in self._found for edge in span), len(self.text)]
        return [self.text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]

    @cached_property
    def _encoded(self) -> list[list[int]]:
        """The tokens of each part; a space before a blank belongs to its filling."""
        bare = [part.removesuffix(" ") for part in self.parts[:-1]] + self.parts[-1:]
        return [*self.vocabulary.own(bare[:1]), *(self.vocabulary.encode_after(part) for part in bare[1:])]

    @cached_property
    def _rules(self) -> list[tuple[bool, bool]]:
        """Whether each blank begins a word, and whether it continues one; both are False if neither is certain."""
        return [
            _rule(self.vocabulary, self.text[:start], part)
            for (start, _), part in zip(self._found, self.parts, strict=False)
        ]

    def widths(self, gap: int) -> list[int]:
        """The number of tokens of each blank: `gap` for `[BLANK]`, 1 for `[MASK]`."""
        return [gap if mark == BLANK else 1 for mark in self.marks]

    def groups(self, max_positions: int, gap: int) -> list[range]:
        """Groups of blanks to fill jointly: all of them if the text fits, otherwise those within half a window."""
        widths = self.widths(gap)
        if self.vocabulary.num_special(paired=False) + sum(widths) + sum(map(len, self._encoded)) <= max_positions:
            return [range(len(widths))]
        groups, first, extent = [], 0, 0
        for number, width in enumerate(widths):
            extent += width + (len(self._encoded[number]) if number > first else 0)
            if number > first and extent > max_positions // 2:
                groups.append(range(first, number))
                first, extent = number, width
        return [*groups, range(first, len(widths))]

    def canvas(
        self,
        gap: int = 1,
        group: range | None = None,
        filled: Sequence[Sequence[int]] = (),
        *,
        widest: int = 1,
        max_positions: int | None = None,
    ) -> BlankCanvas:
        """Makes one sequence whose blanks are editable.

        Args:
            gap: The number of tokens per `[BLANK]`.
            group: Which blanks are editable; None means all.
            filled: The tokens of the blanks before `group`.
            widest: The largest `gap` to be compared, so that the window has the same context for every `gap`.
            max_positions: The length of the window, including special tokens; None uses the whole text.
        """
        group = range(len(self.marks)) if group is None else group
        tokens, editable = list(self._encoded[0]), [False] * len(self._encoded[0])
        rules: dict[int, tuple[bool, bool]] = {}
        for number, width in enumerate(self.widths(gap)):
            rules[len(tokens)] = self._rules[number]
            inside = [self.vocabulary.mask_id] * (width if number in group else 1)
            inside = list(filled[number]) if number < group.start else inside
            tokens += [*inside, *self._encoded[number + 1]]
            editable += [number in group] * len(inside) + [False] * len(self._encoded[number + 1])
        frame = self.vocabulary.encode([""])[0]
        start, stop = 0, len(tokens)
        if max_positions is not None:
            growth = sum(self.widths(max(gap, widest))[group.start : group.stop]) - sum(editable)
            start, stop = _window(editable, max_positions - len(frame) - growth)
        batch = batch_of(self.vocabulary, [[*frame[:-1], *tokens[start:stop], frame[-1]]])
        batch.editable[0, len(frame) - 1 : -1] = torch.tensor(editable[start:stop])
        masks = torch.zeros(2, *batch.tokens.shape, dtype=torch.bool)
        for position, rule in rules.items():
            if start <= position < stop:
                masks[:, 0, position - start + len(frame) - 1] = torch.tensor(rule)
        return BlankCanvas(batch, masks[0] & batch.editable, masks[1] & batch.editable)

    def filled(self, tokens: Sequence[Sequence[int]], *, capitalize: bool = False) -> tuple[str, tuple[str, ...]]:
        """The text with its blanks replaced by these tokens, and the text of each blank on its own."""
        text, generated = self.parts[0], []
        run: list[int] = []
        for number, after in enumerate(self.parts[1:]):
            run += tokens[number]
            if after or number == len(self.marks) - 1:  # blanks that touch are decoded together
                filling = self._decoded(run)
                generated.append((len(text), len(text) + len(filling)))
                text, run = text + filling + after, []
        if capitalize:
            text = with_capitals(text, generated, self.vocabulary)
        return text, tuple(map(self._decoded, tokens))

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.vocabulary.decode(list(tokens)).strip()


def _rule(vocabulary: Vocabulary, before: str, part: str) -> tuple[bool, bool]:
    """Whether a blank begins a word, and whether it continues one.

    Args:
        vocabulary: The tokenizer.
        before: All text before the blank.
        part: The text between the previous blank and this one.
    """
    if before and not part:  # it touches another blank
        return False, False
    last = before[-1:]
    if not last or last.isspace():
        word = vocabulary.encode_after(f"{last}a") if last else vocabulary.own(["a"])[0]
        # A space may be part of the word's first token; other white space has tokens of its own, if any.
        return not bool(vocabulary.continuation[word[0 if last in ("", " ") else -1]]), False
    if unicodedata.category(last)[0] in "LMN" and vocabulary.joins_letters(last):
        return False, bool(vocabulary.continuation.any())
    return vocabulary.has_continuation_prefix, False


def _window(editable: Sequence[bool], room: int) -> tuple[int, int]:
    """The start and end of `room` positions around the editable ones, with equal context on both sides."""
    if len(editable) <= room:
        return 0, len(editable)
    first, last = editable.index(True), len(editable) - 1 - editable[::-1].index(True)
    start = first - (room - (last + 1 - first)) // 2
    start = min(max(start, 0), len(editable) - room)
    return start, start + room
