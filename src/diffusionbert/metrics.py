"""BLEU-4 and self-BLEU as He et al. 2022, §4.3 report them (Papineni et al. 2002, §2), and other measures of texts.

    BLEU-4 = min(1, exp(1 - r / c)) · (p_1 · p_2 · p_3 · p_4)^¼

c is the length of the hypothesis and r the reference length nearest to it, the shorter of two equally near; p_n is
the share of the hypothesis's n-grams found in the references, each counted at most as often as one reference has it.
Quality is the mean over samples against *all* test sentences, self-BLEU that of each sample against all the others.
The paper names no smoothing, and what its authors released uses none, so that is the default. Words are what
whitespace separates; lower-casing and detokenising are the caller's. Knows nothing of models or tokenizers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby
from typing import final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

ORDER = 4
"""The longest n-grams of BLEU-4."""
ABSENT = -1
"""The number of a word or n-gram that the references do not have."""


@final
@dataclass(frozen=True, eq=False)
class PerSample:
    """A figure for every sample, in the order given: its mean is what tables report, the rest is for intervals."""

    values: Floats

    @property
    def mean(self) -> float:
        """The mean over samples."""
        return float(self.values.mean())


class Smoothing(Enum):
    """What stands for a precision of 0, whose logarithm does not exist; no common word at all is BLEU 0 either way."""

    NONE = "none"
    """The smallest normal number, so that BLEU is below 1e-76 (NLTK's method0, its default)."""
    EPSILON = "epsilon"
    """A tenth of an n-gram (NLTK's method1; Chen and Cherry 2014)."""


def bleu4(samples: Sequence[str], references: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> PerSample:
    """BLEU-4 of every sample against all references."""
    return Bleu(references, smoothing).scores(samples)


@final
class Bleu:
    """BLEU-4 against fixed references, whose n-gram maxima are computed once."""

    def __init__(self, references: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> None:
        self._smoothing = smoothing
        self._vocabulary: dict[str, int] = {}
        text = _Text.learning(_checked(references, "references"), self._vocabulary)
        self._tables, counts = _index(text, len(self._vocabulary))
        self._maxima = [own.largest() for own in counts]
        self._lengths = np.unique(text.lengths)

    def scores(self, samples: Sequence[str]) -> PerSample:
        """BLEU-4 of every sample; an empty one has 0."""
        text = _Text.knowing(_checked(samples, "samples"), self._vocabulary)
        counts = _look_up(text, len(self._vocabulary), self._tables)
        matches = [own.clipped(maxima) for own, maxima in zip(counts, self._maxima, strict=True)]
        place = np.searchsorted(self._lengths, text.lengths)
        below = self._lengths[np.maximum(place - 1, 0)]
        above = self._lengths[np.minimum(place, len(self._lengths) - 1)]
        return _bleu(matches, text.lengths, _nearer(text.lengths, below, above), self._smoothing)


def self_bleu4(samples: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> PerSample:
    """BLEU-4 of every sample against all the others; equal samples are references of each other.

    The figures of two samples share their references, so intervals that take them for independent are approximate.
    """
    vocabulary: dict[str, int] = {}
    text = _Text.learning(_checked(samples, "samples", least=2), vocabulary)
    _, counts = _index(text, len(vocabulary))
    # The most that others have is the second most for the one that has the most. For the rest it is the most, but
    # they have no more than the second most themselves, so that one limit serves all.
    matches = [own.clipped(own.second_largest()) for own in counts]
    # Among sorted lengths, the nearest to one of them, itself excepted, is its neighbour on one side.
    order = np.argsort(text.lengths)
    ranked = text.lengths[order]
    below, above = np.append(ranked[1], ranked[:-1]), np.append(ranked[1:], ranked[-2])
    closest = np.empty_like(ranked)
    closest[order] = _nearer(ranked, below, above)
    return _bleu(matches, text.lengths, closest, smoothing)


def most_agreed(candidates: Sequence[str]) -> int:
    """Which candidate agrees best with the others, by mean BLEU-4: minimum Bayes risk (Kumar and Byrne 2004)."""
    agreement = np.stack(
        [bleu4(candidates, [other], Smoothing.EPSILON).values for other in _checked(candidates, "candidates")], axis=1
    )
    np.fill_diagonal(agreement, 0.0)
    return int(agreement.sum(axis=1).argmax())


def _bleu(matches: list[Integers], lengths: Integers, closest: Integers, smoothing: Smoothing) -> PerSample:
    """The formula above by sample: matches by n, the length c, the closest reference length r."""
    found = np.stack(matches, axis=1)
    totals = np.maximum(lengths[:, None] - np.arange(ORDER), 1)
    instead = 0.1 / totals if smoothing is Smoothing.EPSILON else sys.float_info.min
    precisions = np.where(found > 0, found / totals, instead)
    brevity = np.exp(np.minimum(1 - closest / np.maximum(lengths, 1), 0))
    return PerSample(np.where(found[:, 0] > 0, brevity * np.exp(np.log(precisions).mean(axis=1)), 0.0))


def _nearer(lengths: Integers, below: Integers, above: Integers) -> Integers:
    """Of two candidates the nearer, of equally near ones the shorter, which must be `below`."""
    return np.where(np.abs(lengths - below) <= np.abs(above - lengths), below, above)


@final
@dataclass(frozen=True, eq=False)
class _Text:
    """Sentences as numbers of words, one after another."""

    words: Integers
    sentence: Integers
    """The sentence of each word."""
    lengths: Integers

    @classmethod
    def learning(cls, sentences: Sequence[str], vocabulary: dict[str, int]) -> _Text:
        """Gives a number to every word that has none yet."""
        return cls._of(sentences, lambda word: vocabulary.setdefault(word, len(vocabulary)))

    @classmethod
    def knowing(cls, sentences: Sequence[str], vocabulary: dict[str, int]) -> _Text:
        """Leaves words absent that the vocabulary does not have."""
        return cls._of(sentences, lambda word: vocabulary.get(word, ABSENT))

    @classmethod
    def _of(cls, sentences: Sequence[str], number: Callable[[str], int]) -> _Text:
        split = [sentence.split() for sentence in sentences]
        words = np.fromiter((number(word) for word in chain.from_iterable(split)), np.int64)
        lengths = np.array([len(words) for words in split], np.int64)
        return cls(words, np.repeat(np.arange(len(lengths)), lengths), lengths)


@final
@dataclass(frozen=True, eq=False)
class _Counts:
    """How often a sentence has an n-gram, for all pairs where it has: three aligned arrays."""

    ngram: Integers
    sentence: Integers
    count: Integers
    num_sentences: int

    @classmethod
    def of(cls, text: _Text, ngrams: Integers) -> _Counts:
        present, rows = ngrams >= 0, len(text.lengths)
        pairs, count = np.unique(ngrams[present] * rows + text.sentence[present], return_counts=True)
        return cls(pairs // rows, pairs % rows, count, rows)

    @property
    def _num_ngrams(self) -> int:
        return int(self.ngram.max(initial=ABSENT)) + 1

    def clipped(self, limits: Integers) -> Integers:
        """Matches by sentence, where each n-gram counts no more than its limit."""
        matches = np.zeros(self.num_sentences, np.int64)
        np.add.at(matches, self.sentence, np.minimum(self.count, limits[self.ngram]))
        return matches

    def largest(self) -> Integers:
        """By n-gram, the most that any one sentence has of it."""
        maxima = np.zeros(self._num_ngrams, np.int64)
        np.maximum.at(maxima, self.ngram, self.count)
        return maxima

    def second_largest(self) -> Integers:
        """By n-gram, the second most that a sentence has of it: as many as the most if two have that."""
        order = np.lexsort((self.count, self.ngram))
        ngram, count = self.ngram[order], self.count[order]
        exceeded = ngram[:-1] == ngram[1:]  # all but the last of each n-gram
        seconds = np.zeros(self._num_ngrams, np.int64)
        np.maximum.at(seconds, ngram[:-1][exceeded], count[:-1][exceeded])
        return seconds


def _index(text: _Text, size: int) -> tuple[list[Integers], list[_Counts]]:
    """Sorted codes of a text's 2-, 3- and 4-grams, and the counts of its n-grams of all orders."""
    tables: list[Integers] = []
    ngrams, counts = text.words, [_Counts.of(text, text.words)]
    for _ in range(1, ORDER):
        codes = _codes(ngrams, text, size)
        present = codes >= 0
        # Several times faster on millions of words than looking each up in the finished table.
        table, places = np.unique(codes[present], return_inverse=True)
        ngrams = np.full_like(codes, ABSENT)
        ngrams[present] = places
        # Last comes what no code equals, so that looking up never leaves the table.
        tables.append(np.append(table, np.iinfo(np.int64).max))
        counts.append(_Counts.of(text, ngrams))
    return tables, counts


def _look_up(text: _Text, size: int, tables: list[Integers]) -> list[_Counts]:
    """The counts of those n-grams of a text that the tables have."""
    ngrams, counts = text.words, [_Counts.of(text, text.words)]
    for table in tables:
        codes = _codes(ngrams, text, size)
        places = np.searchsorted(table, codes)
        ngrams = np.where(table[places] == codes, places, ABSENT)
        counts.append(_Counts.of(text, ngrams))
    return counts


def _codes(shorter: Integers, text: _Text, size: int) -> Integers:
    """A code for the n-gram that ends at each word: the number of its first n - 1 words, times `size`, plus its last.

    An n-gram's number is the place of its code among the references' sorted codes. Words are numbered below `size`,
    so different n-grams have different codes. Numbers and `size` are at most the count W of the references' words,
    so codes are below W², which an int64 holds up to three thousand million words.
    """
    codes = np.full(len(text.words), ABSENT, np.int64)
    last = text.words[1:]
    whole = (shorter[:-1] >= 0) & (last >= 0) & (text.sentence[:-1] == text.sentence[1:])
    codes[1:][whole] = shorter[:-1][whole] * size + last[whole]
    return codes


def distinct_n(samples: Sequence[str], n: int) -> float:
    """Distinct n-grams of all samples together over all their n-grams (Li et al. 2016).

    It falls as the text grows, so only equally many samples of equal lengths compare.
    """
    ngrams = [ngram for words in _words(samples, "samples") for ngram in _ngrams(words, n)]
    if not ngrams:
        raise ValueError(f"no sample has {n} words, so there are no {n}-grams; ask for a smaller n")
    return len(set(ngrams)) / len(ngrams)


@final
@dataclass(frozen=True)
class Repetition:
    """How much samples repeat themselves."""

    share: PerSample
    """n-grams that stood earlier in the same sample, over all of its n-grams; 0 where it is too short to have any."""
    longest_run: PerSample
    """The longest run of one word: 1 where no word follows itself, 0 where there is none."""


def repetition(samples: Sequence[str], n: int = 4) -> Repetition:
    """How much each sample repeats itself (the share is seq-rep-n of Welleck et al. 2020)."""
    shares, runs = [], []
    for words in _words(samples, "samples"):
        ngrams = list(_ngrams(words, n))
        shares.append(1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0)
        runs.append(max((len(list(run)) for _, run in groupby(words)), default=0))
    return Repetition(PerSample(np.array(shares)), PerSample(np.array(runs, np.float64)))


@final
@dataclass(frozen=True)
class TokenEntropy:
    """Entropies of word frequencies, in nats."""

    pooled: float
    """Of all samples together: low if they are alike, or each is poor."""
    within: PerSample
    """Of each sample alone, at most the log of its length; its mean is what stands beside generative perplexity."""


def token_entropy(samples: Sequence[str]) -> TokenEntropy:
    """The entropy of all words and of each sample's words; give tokens apart by spaces to compare with tokens."""
    split = _words(samples, "samples")
    within = PerSample(np.array([_entropy(Counter(words)) for words in split]))
    return TokenEntropy(_entropy(Counter(chain.from_iterable(split))), within)


def _entropy(counts: Counter[str]) -> float:
    shares = np.array(list(counts.values())) / max(counts.total(), 1)
    return float((shares * np.log(1 / shares)).sum())


def _ngrams(words: list[str], n: int) -> Iterator[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n-grams have at least 1 word, given n = {n}")
    return zip(*(words[start:] for start in range(n)), strict=False)


def _words(sentences: Sequence[str], name: str) -> list[list[str]]:
    """The words of each sentence, of which there must be at least one in all."""
    split = [sentence.split() for sentence in _checked(sentences, name)]
    if not any(split):
        raise ValueError(f"none of the {len(split)} sentences of {name} has a word; at least one must")
    return split


def _checked(sentences: Sequence[str], name: str, least: int = 1) -> Sequence[str]:
    if isinstance(sentences, str):
        raise ValueError(f"{name} must be a list of sentences, given one string {sentences[:40]!r}; put it into a list")
    if len(sentences) < least:
        raise ValueError(f"given {len(sentences)} {name}, at least {least} needed; pass one string a sentence")
    return sentences
