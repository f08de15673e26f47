"""Metrics: BLEU and self-BLEU are NLTK's in every case, the others are worked by hand or checked against scipy."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from scipy.stats import entropy

from diffusionbert.metrics import (
    Bleu,
    Smoothing,
    bleu4,
    distinct_n,
    repetition,
    self_bleu4,
    token_entropy,
)

NLTK_SMOOTHING = {Smoothing.NONE: None, Smoothing.EPSILON: SmoothingFunction().method1}
EXACT = {"rel": 1e-9, "abs": 0}  # stricter than an absolute difference: unsmoothed zeros of 1e-77 and below must agree

# Few words, so that n-grams repeat and lengths tie; the two é differ by normalisation only and are two words.
WORDS = ["a", "b", "é", "e\u0301", "東京"]
SENTENCE = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)
SENTENCES = st.lists(SENTENCE, min_size=1, max_size=6)


def nltk_bleu(sample: str, references: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> float:
    split = [reference.split() for reference in references]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NLTK warns of every unsmoothed zero
        return sentence_bleu(split, sample.split(), smoothing_function=NLTK_SMOOTHING[smoothing])


def nltk_self_bleu(samples: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> list[float]:
    others = [[*samples[:place], *samples[place + 1 :]] for place in range(len(samples))]
    return [nltk_bleu(sample, rest, smoothing) for sample, rest in zip(samples, others, strict=True)]


def zipf(number: int, seed: int, words: int = 60, longest: int = 30) -> list[str]:
    """Sentences of words with frequencies 1 / rank and of lengths from 1."""
    draw = random.Random(seed)
    vocabulary = [f"w{rank}" for rank in range(words)]
    weights = [1 / (rank + 1) for rank in range(words)]
    return [" ".join(draw.choices(vocabulary, weights, k=draw.randint(1, longest))) for _ in range(number)]


@pytest.mark.parametrize("smoothing", Smoothing)
@given(samples=SENTENCES, references=SENTENCES)
def test_bleu_is_that_of_nltk(smoothing, samples, references):
    expected = [nltk_bleu(sample, references, smoothing) for sample in samples]
    assert bleu4(samples, references, smoothing).values == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("smoothing", Smoothing)
@given(samples=st.lists(SENTENCE, min_size=2, max_size=6))
def test_self_bleu_is_that_of_nltk(smoothing, samples):
    assert self_bleu4(samples, smoothing).values == pytest.approx(nltk_self_bleu(samples, smoothing), **EXACT)


@given(samples=st.lists(SENTENCE, min_size=1, max_size=3), copies=st.integers(2, 3))
def test_repeated_samples_are_references_of_each_other(samples, copies):
    repeated = samples * copies
    found = self_bleu4(repeated).values
    assert found == pytest.approx(nltk_self_bleu(repeated), **EXACT)
    assert found == pytest.approx(bleu4(repeated, samples).values, **EXACT)  # removing one copy changes nothing


def test_longer_texts_score_as_in_nltk():
    references, samples = zipf(150, seed=1), zipf(25, seed=2)
    values = bleu4(samples, references).values
    assert values == pytest.approx([nltk_bleu(sample, references) for sample in samples], **EXACT)
    assert np.count_nonzero(values > 0.01) > 5  # not all of them zeros in disguise
    values = self_bleu4(samples + references[:60]).values
    assert values == pytest.approx(nltk_self_bleu(samples + references[:60]), **EXACT)
    assert np.count_nonzero(values > 0.01) > 5


@pytest.mark.parametrize(
    ("sample", "references", "expected"),
    [
        # Lengths 2 and 6 are equally near to 4, and the shorter counts: no penalty for brevity.
        ("a b c d", ["a b c d e f", "a b"], 1.0),
        # 7 is nearer to 5 than 2 is, on whichever side.
        ("a b c d e", ["a b c d e f g", "a b"], math.exp(1 - 7 / 5)),
        # Clipping: of seven, two count, since no single reference has more; the higher orders are a tenth each.
        (
            "the the the the the the the",
            ["the cat is on the mat", "there is the cat"],
            (2 / 7 * 0.1 / 6 * 0.1 / 5 * 0.1 / 4) ** 0.25,
        ),
        # A word alone: the denominators of the higher orders are 1.
        ("the", ["the cat"], math.exp(1 - 2 / 1) * 0.1**0.75),
        ("the", ["the"], 0.1**0.75),
        ("", ["the"], 0.0),
        ("", [""], 0.0),
        ("dog", ["the cat", ""], 0.0),
        # n-grams do not reach over the end of a reference, nor over that of a sample.
        ("a b c d", ["a b", "c d"], (1 * 2 / 3 * 0.1 / 2 * 0.1) ** 0.25),
    ],
)
def test_bleu_worked_by_hand(sample, references, expected):
    # Neighbours on both sides, to show that no n-gram reaches into them.
    found = bleu4(["c d", sample, "a b c"], references, Smoothing.EPSILON).values[1]
    assert found == pytest.approx(expected, **EXACT)
    assert nltk_bleu(sample, references, Smoothing.EPSILON) == pytest.approx(expected, **EXACT)


def test_unsmoothed_zeros_are_tiny_and_no_common_word_is_zero():
    values = bleu4(["a b c x", "x y"], ["a b c d"]).values
    assert 0 < values[0] < 1e-76
    assert values[1] == 0


def test_self_bleu_worked_by_hand():
    # The first has "a" twice, the others once: its own second "a" must not count as found. Lengths 2, 1, 4:
    # nearest to 2 is 1, to 1 is 2, to 4 is 2.
    values = self_bleu4(["a a", "a", "b b b a"], Smoothing.EPSILON).values
    assert values == pytest.approx(
        [
            (1 / 2 * 0.1 * 0.1 * 0.1) ** 0.25,
            math.exp(1 - 2) * 0.1**0.75,
            (1 / 4 * 0.1 / 3 * 0.1 / 2 * 0.1) ** 0.25,
        ],
        **EXACT,
    )


def test_one_index_serves_any_samples_in_any_order():
    references, samples = zipf(40, seed=3), zipf(12, seed=4)
    metric = Bleu(references)
    together = metric.scores(samples)
    assert [metric.scores([sample]).mean for sample in samples] == together.values.tolist()
    assert bleu4(samples, references[::-1]).values.tolist() == together.values.tolist()
    assert self_bleu4(samples[::-1]).values[::-1].tolist() == self_bleu4(samples).values.tolist()
    assert together.mean == pytest.approx(sum(together.values) / 12)


def test_references_are_not_gone_through_for_each_sample():
    references, samples = zipf(1500, seed=5, words=2000), zipf(150, seed=6, words=2000)
    started = time.process_time()
    values = bleu4(samples, references).values
    ours = time.process_time() - started
    started = time.process_time()
    assert nltk_bleu(samples[0], references) == pytest.approx(values[0], **EXACT)
    theirs = (time.process_time() - started) * len(samples)
    assert theirs > 20 * ours  # some 500 here, more at full size (benchmarks/bleu.py); a wide margin for busy machines


def test_distinct_n_counts_over_all_samples_together():
    samples = ["a b a b", "a b c", "d"]  # 2-grams: ab ba ab, ab bc
    assert distinct_n(samples, 1) == 4 / 8
    assert distinct_n(samples, 2) == 3 / 5
    assert distinct_n(samples, 4) == 1


def test_repetition_is_within_a_sample():
    found = repetition(["a b a b a b", "a b c d", "a b", "", "x x x y y z"], n=2)
    assert found.share.values == pytest.approx([3 / 5, 0, 0, 0, 1 / 5])  # "b c" of two samples is no repetition
    assert found.longest_run.values.tolist() == [1, 1, 1, 0, 3]
    assert repetition(["the . the . the . the ."]).share.mean == pytest.approx(3 / 5)  # n = 4
    assert repetition(["a b c d", "a b c d"]).share.mean == 0


def test_entropies_worked_by_hand():
    found = token_entropy(["a a", "b b", "c d", ""])
    assert found.pooled == pytest.approx(2 * (1 / 3 * math.log(3)) + 2 * (1 / 6 * math.log(6)))
    assert found.within.values == pytest.approx([0, 0, math.log(2), 0])
    assert found.within.mean == pytest.approx(math.log(2) / 4)


@given(samples=SENTENCES.filter(any))
def test_pooled_entropy_is_that_of_scipy(samples):
    words = " ".join(samples).split()
    assert token_entropy(samples).pooled == pytest.approx(entropy([words.count(word) for word in set(words)]))


ONE_SIDED: list[Callable[[list[str]], object]] = [
    lambda given: bleu4(given, ["a"]),
    lambda given: bleu4(["a"], given),
    self_bleu4,
    lambda given: distinct_n(given, 1),
    repetition,
    token_entropy,
]


@pytest.mark.parametrize("metric", ONE_SIDED)
def test_no_sentences_and_a_string_for_a_list_are_refused_in_one_line(metric):
    with pytest.raises(ValueError, match=r"^given 0 \w+, at least \d needed; .*$"):
        metric([])
    with pytest.raises(ValueError, match=r"^\w+ must be a list of sentences, given one string 'a b'; .*$"):
        metric("a b")


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: self_bleu4(["a"]), "given 1 samples, at least 2 needed"),
        (lambda: distinct_n(["a b", "c"], 3), "no sample has 3 words"),
        (lambda: distinct_n(["a b"], 0), "given n = 0"),
        (lambda: repetition(["a b"], 0), "given n = 0"),
        (lambda: token_entropy(["", " "]), "none of the 2 sentences of samples has a word"),
    ],
)
def test_what_cannot_be_measured_is_refused(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()
