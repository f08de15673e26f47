"""Requests to a model and their results, as strings and plain numbers; no tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from diffusionbert.likelihood.scores import Protocol
from diffusionbert.likelihood.sentence import Difference
from diffusionbert.objectives.base import Likelihood
from diffusionbert.reporting import require_type
from diffusionbert.storage.limits import Limit
from diffusionbert.storage.schema import to_json


def words_of(words: Sequence[str]) -> tuple[str, ...]:
    """Returns words as a tuple; refuses a single string, which Python would split into letters."""
    if isinstance(words, str):
        raise ValueError(f"words to include or forbid must be a list, got a string; write [{words[:40]!r}]")
    require_type("words to include or forbid", words, Iterable, "a list")
    return tuple(words)


def has_word(text: str, word: str, before: int = 0, after: int = 0) -> bool:
    """Whether a whole word occurs in a text, ignoring case and matches within the `before` first or `after` last
    characters.
    """
    found = re.finditer(rf"(?<!\w)(?={re.escape(word)}(?!\w))", text, re.IGNORECASE)  # overlapping matches, too
    return any(match.start() + len(word) > before and match.start() < len(text) - after for match in found)


MAX_TEXTS = 100_000
"""The most texts per task, because all their canvases are in memory."""


@dataclass(frozen=True)
class Task:
    """A request to generate texts."""

    number: int = 1
    length: int | tuple[int, int] | None = None
    """The number of tokens, or a range to draw it from; None draws it from the length histogram of the training corpus
    (for pairs, of those whose source is about as long)."""
    prompt: str = ""
    source: str | None = None
    """The source text, for models trained on pairs."""
    include: tuple[str, ...] = ()
    """Words that must occur, at any position."""
    forbid: tuple[str, ...] = ()
    """Words that must not be generated; given texts may contain them, and `rewrite` replaces them."""
    rewrite: str | None = None
    """A sentence to rewrite: a fraction of its tokens is masked and generated again."""
    strength: float = 0.4
    """The fraction of tokens to rewrite."""
    seed: int = 0
    max_new_tokens: int | None = None
    """The number of tokens after the prompt, as an alternative to `length`."""
    capitalize: bool = False
    """Whether to restore capitals in the generated text of an uncased model."""
    suffix: str = ""
    """The text that follows the generated part; it counts toward `length`."""

    @property
    def continues(self) -> bool:
        """Whether a given text is continued."""
        return bool(self.prompt or self.suffix)

    def has_forbidden(self, text: str) -> bool:
        """Whether the generated part of a text has a forbidden word."""
        return any(has_word(text, word, len(self.prompt), len(self.suffix)) for word in self.forbid)

    def not_found(self, attempts: int) -> ValueError:
        """The error after so many texts with forbidden words."""
        words = ", ".join(self.forbid)
        return ValueError(f"no text without {words[:40]} in {attempts} attempts; forbid fewer words")

    def __post_init__(self) -> None:
        self._require_kinds()
        if self.max_new_tokens is not None and self.length is not None:
            raise ValueError(
                f"give at most one of `max_new_tokens` and `length`, got {self.max_new_tokens} and {self.length}"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be >= 1, got {self.max_new_tokens}")
        lengths = self.length if isinstance(self.length, tuple) else (self.length,)
        for tokens in (*lengths, self.max_new_tokens):
            if tokens is not None:
                Limit.GENERATED_TOKENS.require(int(tokens), "a text would have too many tokens", "ask for fewer")
        if not 1 <= self.number <= MAX_TEXTS:
            raise ValueError(
                f"`num_return_sequences` must be between 1 and {MAX_TEXTS}, got {self.number}; for more, use several "
                "seeds"
            )
        if self.suffix and (self.source is not None or self.rewrite is not None):
            raise ValueError("a `suffix` goes only with a prompt, not with `source` or `rewrite`; leave it out")
        if self.rewrite is not None and (self.prompt or self.source or self.length):
            raise ValueError("a rewritten text keeps its own length and words; leave out length, prompt and source")
        both = {word.lower() for word in self.include} & {word.lower() for word in self.forbid}
        if both:
            raise ValueError(f"{min(both)[:40]!r} is both included and forbidden; drop one of the two")
        if empty := [word for word in self.include + self.forbid if not word.strip()]:
            raise ValueError(f"words to include or forbid must not be empty, got {empty[0][:40]!r}; leave it out")

    def _require_kinds(self) -> None:
        require_type("number", self.number, Integral, "a whole number")
        require_type("prompt", self.prompt, str, "a text")
        require_type("suffix", self.suffix, str, "a text")
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
    """A generated text."""

    text: str
    length: int
    """Its number of tokens."""
    steps: int
    calls: int
    """The number of network calls for it."""
    seed: int
    kept: tuple[str, ...] = ()
    """Parts of a rewritten text that were left unchanged because the vocabulary does not know them, such as emoji."""


@dataclass(frozen=True)
class StreamState:
    """One intermediate state of a text during sampling."""

    time: float
    calls: int
    pieces: tuple[str | None, ...]
    """The tokens as the tokenizer spells them; None at masked positions."""
    text: str
    """The text so far, with `[MASK]` for each token that is still masked."""
    tokens: tuple[int, ...] = ()
    """The token ids, which cannot be recovered from `pieces` for every tokenizer."""


@dataclass(frozen=True)
class Filling:
    """A text with its blanks filled."""

    text: str
    fillings: tuple[str, ...]
    """The text of each blank, from left to right, as the vocabulary spells it."""
    nats: float
    """The NELBO of the fillings, and of their lengths if these are not given."""
    conditional_on: str
    """What the probability is conditional on: "context, lengths", or "context" if the text has a `[BLANK]`."""


@dataclass(frozen=True)
class Option:
    """One of several options for a blank."""

    option: str
    probability: float
    """p(option | text around it), normalized over the options."""
    nats: float
    """-log p(tokens of the option | text around it, number of tokens), exact in the chosen order of generation."""
    length_nats: float
    """-log p(number of tokens | text around it) under the prior, normalized over the options' lengths."""
    num_tokens: int
    num_unknown: int = 0
    """The number of [UNK] tokens, each of which stands for arbitrary text."""


@dataclass(frozen=True)
class Choice:
    """The options for a blank, with their probabilities."""

    text: str
    options: tuple[Option, ...]
    """The options in the given order."""
    order: str
    prior: str
    kind: Likelihood = Likelihood.EXACT
    conditional_on: str = "the text around the blank, and that one of the options fills it"

    @property
    def best(self) -> str:
        """The most probable option."""
        return max(self.options, key=lambda option: option.probability).option

    def to_json(self) -> dict[str, Any]:
        """Returns the choice as plain data."""
        return vars(self) | {"options": [vars(option) for option in self.options], "kind": self.kind.value}


@dataclass(frozen=True)
class TokenProbability:
    """A token that may fill a blank."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class TextScore:
    """The score of a text; the nats of its tokens add up to it."""

    text: str
    nats: float
    """-log p(text), or a bound on it: see `kind`, `quantity` and `conditional_on`."""
    ci95: tuple[float, float]
    """The 95 % interval of `nats` over draws; its ends are equal if nothing is drawn."""
    nats_per_token: float
    perplexity_per_token: float
    perplexity_per_word: float
    bits_per_byte: float
    kind: Likelihood
    """Exact, bound or pseudo; scores of different kinds are not comparable."""
    quantity: str
    """The quantity computed, such as "continuous-time bound"; different quantities are not comparable."""
    conditional_on: str
    """What the probability is conditional on, such as "length"."""
    num_tokens: int
    num_words: int
    num_bytes: int
    num_draws: int
    """The number of sequences evaluated by the network."""
    precision_reached: bool
    standard_error: float
    """The standard error of `nats` over draws."""
    degrees_of_freedom: float
    """The degrees of freedom of the standard error; infinite if nothing is drawn."""
    protocol: Protocol = field(repr=False)
    num_unknown: int = 0
    """The number of [UNK] tokens. Each stands for arbitrary text, so scores with any are not comparable."""
    tokens: tuple[tuple[str, float], ...] | None = None
    """Each token and its nats, if requested."""
    difference: Difference | None = None
    """The difference to the first text, if texts are compared."""

    def to_json(self) -> dict[str, Any]:
        """Returns the score as plain data."""
        plain = {name: _plain(value) for name, value in vars(self).items() if name not in ("kind", "protocol")}
        return plain | {"kind": self.kind.value, "protocol": to_json(self.protocol)}


@dataclass(frozen=True)
class TotalScore:
    """The score of several texts together."""

    nats: float
    ci95: tuple[float, float]
    """The 95 % interval over draws, for exactly these texts."""
    nats_per_token: float
    perplexity_per_token: float
    perplexity_per_word: float
    bits_per_byte: float
    kind: Likelihood
    quantity: str
    conditional_on: str
    num_texts: int
    num_skipped: int
    """Texts left out of the total because they are too long for the model."""
    num_imprecise: int
    """Texts that did not reach the requested precision."""
    num_tokens: int
    num_words: int
    num_bytes: int
    num_draws: int
    num_unknown: int

    def to_json(self) -> dict[str, Any]:
        """Returns the total as plain data."""
        return {name: _plain(value) for name, value in vars(self).items()} | {"kind": self.kind.value}


def _plain(value: Any) -> Any:
    """A value in the form of JSON, with None for infinite numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return to_json(value) if isinstance(value, Difference) else value
