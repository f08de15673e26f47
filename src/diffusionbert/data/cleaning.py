"""Text cleaning: whitespace, flaws, case, and the spaces that tokenised corpora have around punctuation.

This module does not depend on files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from diffusionbert.data.files import LINE_BYTES, Flaw, Pair


@dataclass(frozen=True)
class Cleaning:
    """Settings for cleaning texts; runs of whitespace always become single spaces."""

    lower: bool = False
    detokenise: bool = False
    """Remove the spaces that One Billion Words and the Penn Treebank have around punctuation."""
    max_characters: int = 10_000

    def __post_init__(self) -> None:
        if not 1 <= self.max_characters <= LINE_BYTES // 4:
            raise ValueError(
                f"`max_characters` must be between 1 and {LINE_BYTES // 4}, got {self.max_characters}; "
                "split longer texts into sentences first"
            )

    def check(self, content: str | Pair) -> str | Pair | Flaw:
        """Normalises whitespace; returns the flaw if the text cannot be used."""
        if isinstance(content, str):
            return self._check_text(content)
        source, target = self._check_text(content.source), self._check_text(content.target)
        if isinstance(source, Flaw):
            return source
        return target if isinstance(target, Flaw) else Pair(source, target)

    def restyle(self, content: str | Pair) -> str | Pair:
        """Detokenises and lower-cases, as the settings say."""
        if isinstance(content, str):
            return self._restyle_text(content)
        return Pair(*map(self._restyle_text, content))

    def _check_text(self, text: str) -> str | Flaw:
        text = " ".join(text.split())
        if not text:
            return Flaw.EMPTY
        if len(text) > self.max_characters:
            return Flaw.LONG
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can contain half a surrogate pair
            return Flaw.NOT_UTF8
        return text

    def _restyle_text(self, text: str) -> str:
        text = detokenise(text) if self.detokenise else text
        return text.lower() if self.lower else text


AS_IT_IS = Cleaning()

_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
_Rules = list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]
_WORD_RULES: _Rules = [
    (re.compile(r"-[LR][RSC]B-"), lambda match: _BRACKETS[match[0]]),
    (re.compile(r"\\([/*])"), r"\1"),  # the Treebank has 1\/2
    (re.compile(r"`` ?"), '"'),
    (re.compile(r" ?''"), '"'),
    (re.compile(r" n't\b", re.IGNORECASE), lambda match: match[0][1:]),
    (re.compile(r"(?<=[\w.]) '(s|t|re|ve|ll|d|m)\b", re.IGNORECASE), r"'\1"),
]
_PUNCTUATION_RULES: _Rules = [
    (re.compile(r"([(\[{]) "), r"\1"),
    (re.compile(r" ([)\]}])"), r"\1"),
    (re.compile(r"([$£€]) (?=\d)"), r"\1"),
    (re.compile(r""" (\.\.\.|[,.;:?!%])(?=[ "')\]]|$)"""), r"\1"),
]


def detokenise(text: str) -> str:
    """Removes the spaces around punctuation, except where the side is ambiguous (a lone `'`, ` - `).

    >>> detokenise("it 's fine , thanks .")
    "it's fine, thanks."
    """
    for pattern, replacement in _WORD_RULES:
        text = pattern.sub(replacement, text)
    text = _close_quotes(text)
    for pattern, replacement in _PUNCTUATION_RULES:
        text = pattern.sub(replacement, text)
    return text


def _close_quotes(text: str) -> str:
    """Attaches `"` to the text it encloses: alternately if their number is even, else only at the start and end."""
    pieces = text.split(' " ')
    inner = len(pieces) - 1
    opened, closed = text.startswith('" '), text.endswith(' "')
    if inner == 0 or (inner + opened + closed) % 2 == 0:
        marks = itertools.cycle(['" ', ' "'] if opened else [' "', '" '])
        text = pieces[0] + "".join(mark + piece for mark, piece in zip(marks, pieces[1:], strict=False))
        text = ('"' + text[2:]) if opened else text
        text = (text[:-2] + '"') if closed else text
    return text
