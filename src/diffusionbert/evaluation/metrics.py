"""Metrics of generated text: BLEU-4 and self-BLEU as in He et al. 2022, §4.3, distinct-n, repetition, entropy.

    BLEU-4 = min(1, exp(1 - r / c)) · (p_1 · p_2 · p_3 · p_4)^¼        (Papineni et al. 2002, §2)

c is the length of the hypothesis and r the reference length closest to it (the shorter one in a tie). p_n is the
fraction of the hypothesis's n-grams that occur in the references, each counted at most as often as in a single
reference. Quality is the mean over samples against *all* test sentences; self-BLEU compares each sample with all
others. The paper mentions no smoothing and its released code uses none, so none is the default. Words are separated by
whitespace; lower-casing and detokenizing are left to the caller. This module does not depend on models or tokenizers.
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
"""The maximum n of BLEU-4."""
UNDERFLOW = 1e-12
"""A BLEU-4 below this counts as 0. NLTK returns such values (1e-78, 1e-155) if there is no common 4-gram."""
ABSENT = -1
"""The id of a word or n-gram that does not occur in the references."""


@final
@dataclass(frozen=True, eq=False)
class PerSample:
    """One value per sample, in input order; tables report the mean, intervals need all values."""

    values: Floats

    @property
    def mean(self) -> float:
        return float(self.values.mean())


class Smoothing(Enum):
    """What replaces a precision of 0 in the logarithm; with no common word at all, BLEU is 0 either way."""

    NONE = "none"
    """No smoothing: BLEU is 0, where NLTK (method0, its default) returns less than 1e-76."""
    EPSILON = "epsilon"
    """Count 0.1 matching n-grams (NLTK's method1; Chen and Cherry 2014)."""


def bleu4(samples: Sequence[str], references: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> PerSample:
    """BLEU-4 of every sample against all references.

    Example:
        `bleu4(["the cat sat on it"], ["the cat sat on the mat", "a dog"]).mean`
    """
    return Bleu(references, smoothing).scores(samples)


@final
class Bleu:
    """BLEU-4 against fixed references, whose n-grams are indexed once."""

    def __init__(self, references: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> None:
        self._smoothing = smoothing
        self._vocabulary: dict[str, int] = {}
        text = _Text.of(_checked(references, "references"), _new_id(self._vocabulary))
        self._tables, counts = _index(text, len(self._vocabulary))
        self._maxima = [own.largest() for own in counts]
        self._lengths = np.unique(text.lengths)

    def scores(self, samples: Sequence[str]) -> PerSample:
        """BLEU-4 of every sample; 0 for an empty one."""
        text = _Text.of(_checked(samples, "samples"), lambda word: self._vocabulary.get(word, ABSENT))
        counts = _look_up(text, len(self._vocabulary), self._tables)
        matches = [own.clipped(maxima) for own, maxima in zip(counts, self._maxima, strict=True)]
        index = np.searchsorted(self._lengths, text.lengths)
        below = self._lengths[np.maximum(index - 1, 0)]
        above = self._lengths[np.minimum(index, len(self._lengths) - 1)]
        return _bleu(matches, text.lengths, _closer(text.lengths, below, above), self._smoothing)


def self_bleu4(samples: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> PerSample:
    """BLEU-4 of every sample against all others; identical samples are references for each other.

    The samples share references, so intervals that treat their values as independent are approximate.
    """
    vocabulary: dict[str, int] = {}
    text = _Text.of(_checked(samples, "samples", least=2), _new_id(vocabulary))
    _, counts = _index(text, len(vocabulary))
    # For the sample with the largest count of an n-gram, the maximum over the others is the second largest count. For
    # the rest it is the largest, but their own counts do not exceed the second largest, so one limit works for all.
    matches = [own.clipped(own.second_largest()) for own in counts]
    # In the sorted lengths, the closest other length is a neighbor.
    order = np.argsort(text.lengths)
    ranked = text.lengths[order]
    below, above = np.append(ranked[1], ranked[:-1]), np.append(ranked[1:], ranked[-2])
    closest = np.empty_like(ranked)
    closest[order] = _closer(ranked, below, above)
    return _bleu(matches, text.lengths, closest, smoothing)


@final
@dataclass(frozen=True, eq=False)
class PairedBleu:
    """The counts for the BLEU-4 of texts, each against a reference of its own."""

    matches: Integers
    """The matching n-grams of each text, by n, [N, 4]."""
    totals: Integers
    """The n-grams of each text, by n, [N, 4]."""
    lengths: Integers
    """The words of each text and of its reference, [N, 2]."""

    @classmethod
    def of(cls, texts: Sequence[str], references: Sequence[str]) -> PairedBleu:
        """Counts the n-grams that each text shares with its reference."""
        counts = [
            [
                [sum((own & other).values()), sum(own.values())]
                for own, other in (
                    (Counter(_ngrams(text, n)), Counter(_ngrams(reference, n))) for n in range(1, ORDER + 1)
                )
            ]
            for text, reference in zip(_words(texts, "texts"), _words(references, "references"), strict=True)
        ]
        found = np.array(counts, np.int64)
        sizes = [[len(text.split()), len(one.split())] for text, one in zip(texts, references, strict=True)]
        return cls(found[..., 0], found[..., 1], np.array(sizes, np.int64))

    @property
    def arrays(self) -> list[Floats]:
        """The ten counts of each text; `value` takes their sums over texts."""
        return list(np.concatenate([self.matches, self.totals, self.lengths], axis=1).T.astype(np.float64))

    @staticmethod
    def value(sums: Sequence[Floats]) -> Floats:
        """BLEU-4 from sums of counts over texts (Papineni et al. 2002); 0 if there is no common 4-gram."""
        matches, totals, (words, reference) = np.stack(sums[:ORDER]), np.stack(sums[ORDER : 2 * ORDER]), sums[-2:]
        with np.errstate(divide="ignore"):
            precision = np.exp(np.log(matches / np.maximum(totals, 1)).mean(axis=0))
        bleu: Floats = np.exp(np.minimum(1 - reference / np.maximum(words, 1), 0)) * precision
        return bleu


def most_agreed(candidates: Sequence[str]) -> int:
    """The index of the candidate with the highest mean BLEU-4 against the others.

    This is minimum Bayes risk decoding (Kumar and Byrne 2004).
    """
    agreement = np.stack(
        [bleu4(candidates, [other], Smoothing.EPSILON).values for other in _checked(candidates, "candidates")], axis=1
    )
    np.fill_diagonal(agreement, 0.0)
    return int(agreement.sum(axis=1).argmax())


def _bleu(matches: list[Integers], lengths: Integers, closest: Integers, smoothing: Smoothing) -> PerSample:
    """BLEU-4 per sample, from the matches by n, the lengths c and the closest reference lengths r."""
    found = np.stack(matches, axis=1)
    totals = np.maximum(lengths[:, None] - np.arange(ORDER), 1)
    epsilon = 0.1 / totals if smoothing is Smoothing.EPSILON else sys.float_info.min
    precisions = np.where(found > 0, found / totals, epsilon)
    brevity = np.exp(np.minimum(1 - closest / np.maximum(lengths, 1), 0))
    scores = brevity * np.exp(np.log(precisions).mean(axis=1))
    return PerSample(without_underflow(np.where(found[:, 0] > 0, scores, 0.0)))


def without_underflow(scores: Floats) -> Floats:
    """BLEU-4 with values below `UNDERFLOW` set to 0; also for results of earlier versions."""
    return np.where(scores < UNDERFLOW, 0.0, scores)


def _closer(lengths: Integers, below: Integers, above: Integers) -> Integers:
    """The closer of two lengths; in a tie, `below`, which must be the shorter one."""
    return np.where(np.abs(lengths - below) <= np.abs(above - lengths), below, above)


@final
@dataclass(frozen=True, eq=False)
class _Text:
    """Concatenated sentences as word ids."""

    words: Integers
    sentence: Integers
    """The sentence index of each word."""
    lengths: Integers

    @classmethod
    def of(cls, sentences: Sequence[str], word_id: Callable[[str], int]) -> _Text:
        split = [sentence.split() for sentence in sentences]
        words = np.fromiter(map(word_id, chain.from_iterable(split)), np.int64)
        lengths = np.array([len(words) for words in split], np.int64)
        return cls(words, np.repeat(np.arange(len(lengths)), lengths), lengths)


def _new_id(vocabulary: dict[str, int]) -> Callable[[str], int]:
    """Maps words to ids; unknown words are added to the vocabulary."""
    return lambda word: vocabulary.setdefault(word, len(vocabulary))


@final
@dataclass(frozen=True, eq=False)
class _Counts:
    """Counts of n-grams per sentence, as three aligned arrays of the nonzero entries."""

    ngram: Integers
    sentence: Integers
    count: Integers
    num_sentences: int

    @classmethod
    def of(cls, text: _Text, ngrams: Integers) -> _Counts:
        present, num_sentences = ngrams >= 0, len(text.lengths)
        pairs, count = np.unique(ngrams[present] * num_sentences + text.sentence[present], return_counts=True)
        return cls(pairs // num_sentences, pairs % num_sentences, count, num_sentences)

    @property
    def _num_ngrams(self) -> int:
        return int(self.ngram.max(initial=ABSENT)) + 1

    def clipped(self, limits: Integers) -> Integers:
        """Matches per sentence, with the count of each n-gram clipped to its limit."""
        matches = np.zeros(self.num_sentences, np.int64)
        np.add.at(matches, self.sentence, np.minimum(self.count, limits[self.ngram]))
        return matches

    def largest(self) -> Integers:
        """The largest count of each n-gram in one sentence."""
        maxima = np.zeros(self._num_ngrams, np.int64)
        np.maximum.at(maxima, self.ngram, self.count)
        return maxima

    def second_largest(self) -> Integers:
        """The second largest count of each n-gram; equal to the largest if two sentences have it."""
        order = np.lexsort((self.count, self.ngram))
        ngram, count = self.ngram[order], self.count[order]
        followed = ngram[:-1] == ngram[1:]  # all but the last entry of each n-gram
        seconds = np.zeros(self._num_ngrams, np.int64)
        np.maximum.at(seconds, ngram[:-1][followed], count[:-1][followed])
        return seconds


def _index(text: _Text, size: int) -> tuple[list[Integers], list[_Counts]]:
    """Sorted codes of the 2-, 3- and 4-grams of a text, and the counts of its n-grams for all n."""
    tables: list[Integers] = []
    ngrams, counts = text.words, [_Counts.of(text, text.words)]
    for _ in range(1, ORDER):
        codes = _codes(ngrams, text, size)
        present = codes >= 0
        # For millions of words, this is several times faster than looking up each code in the finished table.
        table, indices = np.unique(codes[present], return_inverse=True)
        ngrams = np.full_like(codes, ABSENT)
        ngrams[present] = indices
        # The last entry equals no code; it keeps lookups within the table.
        tables.append(np.append(table, np.iinfo(np.int64).max))
        counts.append(_Counts.of(text, ngrams))
    return tables, counts


def _look_up(text: _Text, size: int, tables: list[Integers]) -> list[_Counts]:
    """The counts of the n-grams of a text that are in the tables."""
    ngrams, counts = text.words, [_Counts.of(text, text.words)]
    for table in tables:
        codes = _codes(ngrams, text, size)
        indices = np.searchsorted(table, codes)
        ngrams = np.where(table[indices] == codes, indices, ABSENT)
        counts.append(_Counts.of(text, ngrams))
    return counts


def _codes(shorter: Integers, text: _Text, size: int) -> Integers:
    """The code of the n-gram that ends at each word: the id of its first n - 1 words, times `size`, plus its last word.

    The id of an n-gram is the index of its code in the sorted codes of the references. Word ids are below `size`, so
    the codes of different n-grams differ. Ids and `size` are at most the number W of words in the references, so
    codes are below W², which fits in an int64 for up to three billion words.
    """
    codes = np.full(len(text.words), ABSENT, np.int64)
    last = text.words[1:]
    valid = (shorter[:-1] >= 0) & (last >= 0) & (text.sentence[:-1] == text.sentence[1:])
    codes[1:][valid] = shorter[:-1][valid] * size + last[valid]
    return codes


def distinct_n(samples: Sequence[str], n: int) -> float:
    """The number of distinct n-grams divided by the number of all n-grams, over all samples (Li et al. 2016).

    It decreases with the amount of text, so compare only equal numbers of samples of similar lengths.
    """
    ngrams = [ngram for words in _words(samples, "samples") for ngram in _ngrams(words, n)]
    if not ngrams:
        raise ValueError(f"no sample has {n} or more words; give a smaller `n`")
    return len(set(ngrams)) / len(ngrams)


@final
@dataclass(frozen=True)
class Repetition:
    """Repetition within samples."""

    fraction: PerSample
    """The fraction of n-grams that occur earlier in the same sample; 0 for samples of fewer than n words."""
    longest_run: PerSample
    """The longest run of one word: 1 if no word follows itself, 0 if the sample is empty."""


def repetition(samples: Sequence[str], n: int = 4) -> Repetition:
    """Repetition within each sample; the fraction is seq-rep-n of Welleck et al. 2020."""
    fractions, runs = [], []
    for words in _words(samples, "samples"):
        ngrams = list(_ngrams(words, n))
        fractions.append(1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0)
        runs.append(max((len(list(run)) for _, run in groupby(words)), default=0))
    return Repetition(PerSample(np.array(fractions)), PerSample(np.array(runs, np.float64)))


@final
@dataclass(frozen=True)
class TokenEntropy:
    """Entropies of word frequencies, in nats."""

    pooled: float
    """The entropy over all samples together; low if samples are alike or use few words each."""
    within: PerSample
    """The entropy of each sample, at most the log of its length; its mean is usually reported with generative
    perplexity."""


def token_entropy(samples: Sequence[str]) -> TokenEntropy:
    """Entropies of word frequencies; for token entropies, join the tokens of each sample with spaces."""
    split = _words(samples, "samples")
    within = PerSample(np.array([entropy([*Counter(words).values()]) for words in split]))
    return TokenEntropy(entropy([*Counter(chain.from_iterable(split)).values()]), within)


def entropy(counts: Sequence[int] | Integers) -> float:
    """The entropy of frequencies, in nats; 0 if nothing was counted."""
    numbers = np.asarray(counts, np.float64)
    fractions = numbers[numbers > 0] / max(numbers.sum(), 1)
    return float((fractions * np.log(1 / fractions)).sum())


def _ngrams(words: list[str], n: int) -> Iterator[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"`n` must be >= 1, got {n}")
    return zip(*(words[start:] for start in range(n)), strict=False)


def _words(sentences: Sequence[str], name: str) -> list[list[str]]:
    """The words of each sentence; raises if there are none at all."""
    split = [sentence.split() for sentence in _checked(sentences, name)]
    if not any(split):
        raise ValueError(f"`{name}` must contain at least one word, got {len(split)} empty sentences; give text")
    return split


def _checked(sentences: Sequence[str], name: str, least: int = 1) -> Sequence[str]:
    if isinstance(sentences, str):
        raise ValueError(f"`{name}` must be a list of sentences, got the string {sentences[:40]!r}; put it into a list")
    if len(sentences) < least:
        raise ValueError(f"`{name}` must have length >= {least}, got {len(sentences)}; give one string per sentence")
    return sentences
