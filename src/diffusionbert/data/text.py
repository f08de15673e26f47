"""Text being edited: the user's string, and the characters covered by each token of its sequence.

A prompt, a sentence to rewrite and a text with blanks (`data.blanks`) differ only in which positions are generated.
`EditedText.render` decodes only the generated positions and copies all other characters of the string unchanged. White
space that the user put next to a generated part is kept; where there is none, the decoder decides.

Generated text never alters a word that is kept: a position where a word of the string begins, or that follows a prompt,
never gets a continuation token (`word_starts`). This module does not depend on networks or samplers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from diffusionbert.data.canvas import batch_of
from diffusionbert.data.letter_case import with_capitals
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PositionMask

MASK = "[MASK]"
"""Marks one token, whatever the vocabulary's own mask token looks like."""
BLANK = "[BLANK]"
"""Marks a gap of unknown length."""
LONGEST_WORD = 8
"""The most tokens masked together as one word; in scripts without spaces, a "word" may be a whole sentence."""

NEAR = 128
"""How many tokens on each side are decoded to find the white space around generated ones."""

Span = tuple[int, int]
"""The start and end of a part of a string, in characters."""


def blank_marks(vocabulary: Vocabulary) -> re.Pattern[str]:
    """A pattern for `[MASK]`, `[BLANK]` and the vocabulary's own mask token."""
    return re.compile("|".join(map(re.escape, dict.fromkeys([str(vocabulary.tokenizer.mask_token), MASK, BLANK]))))


def require_no_blanks(vocabulary: Vocabulary, text: str, what: str) -> None:
    """Raises ValueError if a text such as a prompt contains a blank, which only `fill` accepts."""
    if found := blank_marks(vocabulary).search(text):
        raise ValueError(f"{what} must not contain {found[0]}, got {text[:40]!r}; use `fill` to fill blanks")


@final
@dataclass(frozen=True)
class EditedText:
    """A string, and the characters covered by each position of its sequence."""

    vocabulary: Vocabulary
    text: str
    tokens: tuple[int, ...]
    """The whole sequence, including special tokens."""
    spans: tuple[Span | None, ...]
    """The characters of each token; None for special tokens and a source, which are not part of the string."""
    gap: Span | None = None
    """The position and the character at which new tokens are inserted; None means at the end of the text."""

    @classmethod
    def of(cls, vocabulary: Vocabulary, text: str, source: str | None = None) -> EditedText:
        """Encodes a text, after a source sentence if there is one.

        One trailing space is dropped: in many vocabularies it belongs to the next token.
        """
        tokens, spans = vocabulary.encode_spans(text.removesuffix(" "), source)
        starts = [span[0] for span in spans if span is not None][1:]
        limits = iter([*starts, len(text)])
        own = tuple(None if span is None else _trimmed(text, span, next(limits)) for span in spans)
        return cls(vocabulary, text, tuple(tokens), own)

    @classmethod
    def around(cls, vocabulary: Vocabulary, prompt: str, suffix: str) -> EditedText:
        """Encodes the text before and the text after the part to be generated, each on its own."""
        before, after = cls.of(vocabulary, prompt), cls.of(vocabulary, suffix)
        inside = slice(after.own[0], after.own[-1] + 1) if after.own else slice(0)
        spans = [(span[0] + len(prompt), span[1] + len(prompt)) for span in filter(None, after.spans[inside])]
        return cls(
            vocabulary,
            prompt + suffix,
            before.tokens[: before.end] + after.tokens[inside] + before.tokens[before.end :],
            before.spans[: before.end] + tuple(spans) + before.spans[before.end :],
            (before.end, len(prompt)),
        )

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The positions of the text's own tokens."""
        return tuple(position for position, span in enumerate(self.spans) if span is not None)

    @property
    def end(self) -> int:
        """The position after the prompt's tokens: the last special token's, unless a suffix follows."""
        return len(self.tokens) - 1 if self.gap is None else self.gap[0]

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def continued(self, number: int) -> EditedText:
        """This prompt followed by `number` masked positions."""
        after = ((len(self.text) if self.gap is None else self.gap[1],) * 2,) * number
        return replace(
            self,
            tokens=self.tokens[: self.end] + (self.vocabulary.mask_id,) * number + self.tokens[self.end :],
            spans=self.spans[: self.end] + after + self.spans[self.end :],
        )

    # ---- rewriting --------------------------------------------------------------------------------------------------

    @cached_property
    def words(self) -> tuple[tuple[int, ...], ...]:
        """The positions that can be rewritten, grouped by word, without unknown tokens and white space.

        A token that continues a word, or shares a character with the token before it, belongs to the same word.
        """
        words: list[list[int]] = []
        for position in self.own:
            start, _ = self._span(position)
            last = words[-1][-1] if words else -1
            shares = bool(words) and start < self._span(last)[1]
            continues = bool(self.vocabulary.continuation[self.tokens[position]]) and last == position - 1
            if shares or (continues and start == self._span(last)[1] and len(words[-1]) < LONGEST_WORD):
                words[-1].append(position)
            else:
                words.append([position])
        unknown = [self._span(position) for position in self.own if self.tokens[position] == self.vocabulary.unk_id]

        def is_free(position: int) -> bool:
            start, end = self._span(position)
            return start < end and not any(_overlap((start, end), span) for span in unknown)

        return tuple(filter(None, (tuple(filter(is_free, word)) for word in words)))

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts of the text that the vocabulary does not know; they are never rewritten."""
        unknown = [span for token, span in zip(self.tokens, self.spans, strict=True) if token == self.vocabulary.unk_id]
        return tuple(self.text[start:end] for start, end in filter(None, unknown))

    @cached_property
    def word_starts(self) -> PositionMask:
        """The positions where a rewritten text must not continue the word before, [1, L]."""
        tokens = torch.tensor([self.tokens])
        return ~self.vocabulary.continuation[tokens] & ~self.vocabulary.special[tokens]

    def rewriting(self, strength: float, number: int, seed: int, unwanted: Sequence[str] = ()) -> Batch:
        """Makes copies of the text, each with a different random selection of words editable.

        Args:
            strength: The largest fraction of tokens to make editable; at least one word always is.
            number: The number of copies.
            seed: The same seed chooses the same words.
            unwanted: Words that are always editable.
        """
        if not 0 < strength <= 1:
            raise ValueError(f"`strength` must be in (0, 1], got {strength}; 0.4 masks 40 % of the tokens")
        if not self.words:
            reason = "the vocabulary knows none of its characters" if self.unknown else "give a sentence"
            raise ValueError(f"nothing to rewrite in {self.text[:40]!r}; {reason}")
        canvas = batch_of(self.vocabulary, [self.tokens] * number)
        required = self._containing(unwanted)
        budget = max(1, round(strength * len(self.own))) - sum(len(self.words[word]) for word in required)
        order = Noise(seed).per_position(canvas, Purpose.ORDER)[:, [word[0] for word in self.words]].argsort(dim=1)
        editable = torch.zeros_like(canvas.editable)
        for sequence, ranked in enumerate(order.tolist()):
            chosen = self._chosen([word for word in ranked if word not in required], budget, forced=not required)
            editable[sequence, [position for word in required | chosen for position in self.words[word]]] = True
        return replace(canvas, editable=editable)

    def _chosen(self, ranked: Sequence[int], budget: int, *, forced: bool) -> set[int]:
        """The first words that fit into the token budget; at least one if `forced`."""
        chosen: set[int] = set()
        for word in ranked:
            if len(self.words[word]) <= budget:
                chosen.add(word)
                budget -= len(self.words[word])
        return chosen or ({ranked[0]} if forced else set())

    def _containing(self, unwanted: Sequence[str]) -> set[int]:
        """The indices of the words that overlap an unwanted one."""
        found: set[int] = set()
        for word in unwanted:
            for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", self.text, re.IGNORECASE):
                inside = {
                    number
                    for number, positions in enumerate(self.words)
                    if any(_overlap(self._span(position), match.span()) for position in positions)
                }
                if not inside:
                    raise ValueError(f"{match[0][:40]!r} cannot be replaced: the vocabulary does not know it")
                found |= inside
        return found

    # ---- rendering --------------------------------------------------------------------------------------------------

    def render(self, tokens: Sequence[int] | Tensor, editable: Sequence[bool] | Tensor, *, capitalize: bool) -> str:
        """The string with its editable positions replaced by generated text.

        Args:
            tokens: The generated sequence; masked positions are shown as `[MASK]`.
            editable: Which positions were generated.
            capitalize: Whether to restore capitals in the generated parts.
        """
        ids: Sequence[int] = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        flags: Sequence[bool] = editable.tolist() if isinstance(editable, Tensor) else editable
        text, at, generated = "", 0, []
        for first, last in self._runs(self._changed(ids, flags)):
            start, end = self._span(first)[0], self._span(last)[1]
            middle = self._between(ids, first, last + 1)
            is_inserted = start == end  # then no character is replaced
            if self.text and self._is_tight(start - 1, -1 if is_inserted else start, middle.lstrip()[:1]):
                middle = middle.lstrip()
            if self.text and self._is_tight(end, -1 if is_inserted else end - 1, middle.rstrip()[-1:]):
                middle = middle.rstrip()
            text += self.text[at:start]
            generated.append((len(text), len(text) + len(middle)))
            text, at = text + middle, end
        text += self.text[at:]
        return with_capitals(text, generated, self.vocabulary) if capitalize else text

    def _changed(self, tokens: Sequence[int], editable: Sequence[bool]) -> Sequence[bool]:
        """The generated positions, except words that came out unchanged, so that these keep their letter case."""
        mask_id = self.vocabulary.mask_id
        same = [token == old != mask_id for token, old in zip(tokens, self.tokens, strict=True)]
        if not any(flag and new for flag, new in zip(same, editable, strict=True)):
            return editable
        changed = list(editable)
        for word in self.words:
            if all(same[position] for position in word):
                for position in word:
                    changed[position] = False
        return changed

    def _is_tight(self, neighbor: int, replaced: int, generated: str) -> bool:
        """Whether no white space goes between a kept character and a generated one.

        None goes at the ends of the text or next to the user's own white space, nor where a letter replaces a letter,
        or punctuation replaces punctuation, that touched its neighbor: `U.S.`, `(king)`.
        """
        if not 0 <= neighbor < len(self.text) or self.text[neighbor].isspace():
            return True
        return 0 <= replaced < len(self.text) and _is_letter(self.text[replaced]) == _is_letter(generated)

    def _runs(self, editable: Sequence[bool]) -> Iterator[Span]:
        """The first and last positions of each generated part; a kept character ends a part."""
        first, joined = None, self._joined
        for position in (position for position in self.own if editable[position]):
            if first is None:
                first = last = position
            elif position == last + 1 and position in joined:
                last = position
            else:
                yield first, last
                first = last = position
        if first is not None:
            yield first, last

    @cached_property
    def _joined(self) -> frozenset[int]:
        """The positions with no character between their token and the one before."""
        pairs = enumerate(pairwise(self.spans), start=1)
        return frozenset(position for position, (one, other) in pairs if one and other and other[0] <= one[1])

    def _between(self, tokens: Sequence[int], start: int, end: int) -> str:
        """The text of the tokens from `start` to `end`, with the white space that the decoder puts around them."""
        decode, mask_id = self.vocabulary.decode, self.vocabulary.mask_id
        left = [tokens[p] for p in self.own if start - NEAR <= p < start]
        right = [tokens[p] for p in self.own if end <= p < end + NEAR]
        if mask_id in tokens[start:end]:
            shown = with_gaps(self.vocabulary, tokens[start:end])
            return f" {shown} " if self.text else shown
        if not left and not right:
            return decode(tokens[start:end])
        before, whole, after = decode(left), decode([*left, *tokens[start:end], *right]), decode(right)
        # Decoding changes only white space (`'` is joined to what follows), so count the other characters.
        solid = [index for index, character in enumerate(whole) if not character.isspace()]
        num_before, num_after = (sum(not one.isspace() for one in text) for text in (before, after))
        if num_before + num_after > len(solid):
            return f" {decode(tokens[start:end]).strip()} "
        first = solid[num_before - 1] + 1 if num_before else 0
        return whole[first : solid[-num_after] if num_after else len(whole)]

    def _span(self, position: int) -> Span:
        span = self.spans[position]
        assert span is not None
        return span


def with_gaps(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """The text of partly masked tokens, with `[MASK]` for each masked one."""
    parts: list[list[int]] = [[]]
    shown = []
    for token in tokens:
        if token == vocabulary.mask_id:
            shown += [vocabulary.decode(parts[-1]), MASK]
            parts.append([])
        else:
            parts[-1].append(token)
    return " ".join(filter(None, (part.strip() for part in [*shown, vocabulary.decode(parts[-1])])))


def _trimmed(text: str, span: Span, limit: int) -> Span:
    """The span of a token without white space at its ends, and with combining marks that follow it before `limit`."""
    start, end = span
    while end < limit and unicodedata.category(text[end]) in ("Mn", "Me", "Cf"):
        end += 1
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _is_letter(character: str) -> bool:
    return unicodedata.category(character or " ")[0] in "LMN"


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
