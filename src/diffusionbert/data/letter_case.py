"""The usual letter case of words, learned from the training text of an uncased model.

Such a model generates "new york", which is then shown as "New York". A form is a number: bit i means that letter i is a
capital, 255 that all letters are. Forms are learned for each token that begins a word, separately for one-token words
and longer ones, and separately by context, as names require: whether the words directly before and after have capitals.
Words that begin a sentence or a quotation, or follow an apostrophe, are ignored, because their case says nothing about
the word. This module does not depend on networks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.capitals import capitalized
from diffusionbert.data.tokenizer import Vocabulary

UPPER = 255
"""The form of a word in all capitals."""
LEAST_SHARE = 0.6
"""A word gets capitals if at least this fraction of its occurrences has them."""
LEAST_COUNT = 3
"""The minimum number of occurrences of a word in a context; with fewer, its occurrences in all contexts decide."""
NATURAL_SHARE = 0.01
"""The minimum fraction of words with capitals in a text of natural case; in English it is about a tenth."""
NUM_CONTEXTS = 5
"""Context 0 is any context; then capitals in no neighbor, in the word before, in the word after, and in both."""
APOSTROPHES = "'", "’"
Word = tuple[str, bool, bool]
"""A word, whether its case is informative, and whether it directly follows the previous word."""
_LONGEST = 8  # the number of letters described by a form
_WORDS = re.compile(r"([\W_]*)([^\W_]+)")


def count_forms(texts: Iterable[str], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Counts how often each token begins a word of each form in each context; returns keys and counts, [2, N]."""
    found: Counter[tuple[str, int]] = Counter()
    for text in texts:
        words = list(_words(text))
        found.update((word, _context(words, at)) for at, (word, is_telling, _) in enumerate(words) if is_telling)
    distinct = list(dict.fromkeys(word for word, _ in found))
    first = dict(zip(distinct, _first_tokens(distinct, vocabulary), strict=True))
    keys: Counter[int] = Counter()
    for (word, context), count in found.items():
        if (row := first[word]) is not None:
            form = form_of(word)
            keys[(row * NUM_CONTEXTS + context) * 256 + form] += count
            keys[row * NUM_CONTEXTS * 256 + form] += count
    return np.array([list(keys.keys()), list(keys.values())], np.int64).reshape(2, -1)


def _words(text: str) -> Iterator[Word]:
    for number, (gap, word) in enumerate(_WORDS.findall(text)):
        is_telling, follows = _kind_of(gap)
        yield word, number > 0 and is_telling, number > 0 and follows


def _context(words: Sequence[Word], at: int) -> int:
    """The context of a word."""
    before = words[at][2] and words[at - 1][1] and _has_capitals(words[at - 1][0])
    after = at + 1 < len(words) and words[at + 1][2] and _has_capitals(words[at + 1][0])
    return 1 + before + 2 * after


def _has_capitals(word: str) -> bool:
    return word != word.lower()


@lru_cache(1024)
def _kind_of(gap: str) -> tuple[bool, bool]:
    """Whether the case of the word after this gap is informative, and whether it directly follows the previous word."""
    begins = re.search(r"""[.!?:;]["'”’)\]]*\s|["“„«]""", gap)
    return not (begins or gap.endswith(APOSTROPHES)), gap in (" ", "-")


def _first_tokens(words: Sequence[str], vocabulary: Vocabulary, at_once: int = 64) -> list[int | None]:
    """For each word, 2 · its first token, plus 1 if it has more tokens; None for unknown words.

    Words are encoded together, which is several times faster, unless their tokens do not show where words begin.
    """
    found: list[int | None] = []
    chunks = [words[start : start + at_once] for start in range(0, len(words), at_once)]
    continues = vocabulary.continuation.tolist()
    for chunk, tokens in zip(chunks, vocabulary.own([" ".join(chunk) for chunk in chunks]), strict=True):
        starts = [at for at, token in enumerate(tokens) if not continues[token]]
        parts = [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
        for part in parts if len(parts) == len(chunk) else vocabulary.own(chunk):
            is_known = part and part[0] != vocabulary.unk_id
            found.append(2 * part[0] + (len(part) > 1) if is_known else None)
    return found


def form_of(word: str) -> int:
    """The form of a word."""
    if len(word) > 1 and word.isupper():
        return UPPER
    return sum(1 << position for position, letter in enumerate(word[:_LONGEST]) if letter.isupper())


def learned(counted: NDArray[np.int64], vocab_size: int) -> Tensor | None:
    """The usual forms of one-token words and of longer ones, [V, 2, contexts]; None if the case is not natural.

    Args:
        counted: The result of `count_forms`; results for several texts may be concatenated.
        vocab_size: The number of ids.
    """
    unique, places = np.unique(counted[0], return_inverse=True)
    totals = np.bincount(places, weights=counted[1], minlength=len(unique))
    rows, forms = np.divmod(unique, 256)
    if not totals.sum() or totals[forms > 0].sum() < NATURAL_SHARE * totals.sum():
        return None
    size = vocab_size * 2 * NUM_CONTEXTS
    seen = np.bincount(rows, weights=totals, minlength=size)
    capital = np.bincount(rows, weights=totals * (forms > 0), minlength=size)
    usual = np.zeros(size, np.uint8)
    rising = np.argsort(totals, kind="stable")  # so that the most frequent form is set last
    rising = rising[forms[rising] > 0]
    usual[rows[rising]] = forms[rising]
    usual[capital < LEAST_SHARE * seen] = 0
    in_context = usual.reshape(vocab_size, 2, NUM_CONTEXTS)
    is_rare = (seen < LEAST_COUNT).reshape(in_context.shape)
    return torch.from_numpy(np.where(is_rare, in_context[:, :, :1], in_context))


def with_capitals(text: str, generated: Sequence[tuple[int, int]], vocabulary: Vocabulary) -> str:
    """Restores capitals in the parts of a text that an uncased model generated; the rest stays as it is.

    Args:
        text: The whole text.
        generated: The start and end of each generated part, in characters.
        vocabulary: The tokenizer, with the usual forms of words if they were learned.
    """
    if not vocabulary.lowers:
        return text
    forms = vocabulary.letter_case
    return capitalized(text if forms is None else _restored(text, generated, vocabulary, forms), generated)


def _restored(text: str, generated: Sequence[tuple[int, int]], vocabulary: Vocabulary, forms: Tensor) -> str:
    """Gives generated words their usual form, given the forms of their neighbors."""
    found, words = list(_WORDS.finditer(text)), list(_words(text))
    rows = _first_tokens([word.lower() for word, *_ in words], vocabulary)
    usual: list[list[int]] = [[0] * NUM_CONTEXTS if row is None else forms[row // 2, row % 2].tolist() for row in rows]
    free = [
        not match[1].endswith(APOSTROPHES)
        and any(start <= match.start(2) < match.end() <= end for start, end in generated)
        for match in found
    ]
    likely: list[Word] = [
        (in_form(word, usual[at][0]) if free[at] else word, is_telling, follows)
        for at, (word, is_telling, follows) in enumerate(words)
    ]
    letters = list(text)
    for at, (match, is_free) in enumerate(zip(found, free, strict=True)):
        if is_free:
            letters[match.start(2) : match.end()] = in_form(match[2], usual[at][_context(likely, at)])
    return "".join(letters)


def in_form(word: str, form: int) -> str:
    """A word with the capitals of its form, except where upper case has several characters."""
    chosen = (letter.upper() if form == UPPER or form >> at & 1 else letter for at, letter in enumerate(word))
    return "".join(new if len(new) == 1 else old for old, new in zip(word, chosen, strict=True))
