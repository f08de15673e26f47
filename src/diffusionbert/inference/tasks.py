"""What is asked of a model, and what it answers, in strings and plain numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from diffusionbert.likelihood.protocol import Protocol
from diffusionbert.objectives.base import Likelihood
from diffusionbert.reporting import require_type
from diffusionbert.storage.schema import to_json


def words_of(words: Sequence[str]) -> tuple[str, ...]:
    """A list of words; a string is a list of letters, which nobody means."""
    if isinstance(words, str):
        raise ValueError(f"a list of words is expected, given the string {words!r}; write [{words!r}]")
    require_type("words to include or forbid", words, Iterable, "a list")
    return tuple(words)


def has_word(text: str, word: str, given: int = 0) -> bool:
    """Whether a word stands in a text by itself, in whatever case, and not within so many first characters of it."""
    found = re.finditer(rf"(?<!\w)(?={re.escape(word)}(?!\w))", text, re.IGNORECASE)  # also those that overlap
    return any(match.start() + len(word) > given for match in found)


MAX_TEXTS = 100_000
"""In one task: all their canvases are in memory."""


@dataclass(frozen=True)
class Task:
    """What is to be written."""

    number: int = 1
    length: int | tuple[int, int] | None = None
    """Tokens of the sentence, or a range to draw from; None draws as the training corpus does."""
    prompt: str = ""
    source: str | None = None
    """For models trained on pairs: the text to be answered."""
    include: tuple[str, ...] = ()
    """Words that must occur, wherever."""
    forbid: tuple[str, ...] = ()
    """Words that must not be written; a prompt and a source may have them, and a rewriting replaces them."""
    rewrite: str | None = None
    """A sentence of which a share is hidden and written anew."""
    strength: float = 0.4
    """That share."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_kinds()
        if not 1 <= self.number <= MAX_TEXTS:
            raise ValueError(f"1 to {MAX_TEXTS} texts can be asked for at a time, given {self.number}")
        if self.rewrite is not None and (self.prompt or self.source or self.length):
            raise ValueError(
                "a text that is rewritten keeps its own length and words: leave out length, prompt, source"
            )
        both = {word.lower() for word in self.include} & {word.lower() for word in self.forbid}
        if both:
            raise ValueError(f"{min(both)!r} is both to be included and forbidden; drop one of the two")
        if empty := [word for word in self.include + self.forbid if not word.strip()]:
            raise ValueError(f"{empty[0]!r} is no word to include or forbid; give a word, or leave it out")

    def _require_kinds(self) -> None:
        require_type("number", self.number, Integral, "a whole number")
        require_type("prompt", self.prompt, str, "a text")
        require_type("strength", self.strength, Real, "a number")
        for name, text in (("source", self.source), ("rewrite", self.rewrite)):
            require_type(name, text, (str, type(None)), "a text or None")
        for word in self.include + self.forbid:
            require_type("a word to include or forbid", word, str, "a text")
        lengths = self.length if isinstance(self.length, tuple) and len(self.length) == 2 else (self.length,)
        for length in lengths:
            require_type("length", length, (Integral, type(None)), "a whole number, a pair (10, 30), or None")


@dataclass(frozen=True)
class GeneratedText:
    """One generated text."""

    text: str
    length: int
    """Its number of tokens."""
    steps: int
    calls: int
    """How often the network was asked about it."""
    seed: int


@dataclass(frozen=True)
class StreamState:
    """One state of a text on its way."""

    time: float
    calls: int
    pieces: tuple[str | None, ...]
    """The tokens as the vocabulary spells them; None where one is hidden."""
    text: str
    """What is written so far, hidden places left out."""
    tokens: tuple[int, ...] = ()
    """Their ids: not every vocabulary's spelling leads back to them."""


@dataclass(frozen=True)
class Filling:
    """A text with its blanks filled."""

    text: str
    fillings: tuple[str, ...]
    """What was written into each blank, from left to right."""
    nats: float
    """-log p(fillings | context); where blanks of unknown length are compared, -log p(text)."""


@dataclass(frozen=True)
class TextScore:
    """How much a sentence surprises the model."""

    text: str
    nats: float
    perplexity_per_token: float
    perplexity_per_word: float
    bits_per_byte: float
    ci95: tuple[float, float]
    """Of the nats, over draws."""
    likelihood: Likelihood
    protocol: Protocol
    num_unknown: int = 0
    """Tokens outside the vocabulary; each stands for whatever text, so that figures with any are hard to compare."""

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        plain = {name: value for name, value in vars(self).items() if name not in ("likelihood", "protocol")}
        return plain | {"likelihood": self.likelihood.value, "protocol": to_json(self.protocol)}
