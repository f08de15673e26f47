"""Metrics: BLEU and self-BLEU equal NLTK's; the others are computed by hand or checked against scipy."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from scipy.stats import entropy

from diffusionbert.evaluation.metrics import (
    UNDERFLOW,
    Bleu,
    Smoothing,
    bleu4,
    distinct_n,
    repetition,
    self_bleu4,
    token_entropy,
)

NLTK_SMOOTHING = {Smoothing.NONE: None, Smoothing.EPSILON: SmoothingFunction().method1}
EXACT = {"rel": 1e-9, "abs": 0}

# Few words, so that n-grams repeat and lengths tie; the two é differ in Unicode normalization and are different words.
WORDS = ["a", "b", "é", "e\u0301", "東京"]
SENTENCE = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)
SENTENCES = st.lists(SENTENCE, min_size=1, max_size=6)


def nltk_bleu(sample: str, references: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> float:
    split = [reference.split() for reference in references]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NLTK warns of every unsmoothed zero
        found = sentence_bleu(split, sample.split(), smoothing_function=NLTK_SMOOTHING[smoothing])
    return found if found >= UNDERFLOW else 0.0


def nltk_self_bleu(samples: Sequence[str], smoothing: Smoothing = Smoothing.NONE) -> list[float]:
    others = [[*samples[:index], *samples[index + 1 :]] for index in range(len(samples))]
    return [nltk_bleu(sample, rest, smoothing) for sample, rest in zip(samples, others, strict=True)]


def zipf(number: int, seed: int, words: int = 60, longest: int = 30) -> list[str]:
    """Sentences of 1 to `longest` words with frequencies proportional to 1 / rank."""
    draw = random.Random(seed)
    vocabulary = [f"w{rank}" for rank in range(words)]
    weights = [1 / (rank + 1) for rank in range(words)]
    return [" ".join(draw.choices(vocabulary, weights, k=draw.randint(1, longest))) for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", Smoothing)
@given(samples=SENTENCES, references=SENTENCES)
def test_bleu_equals_nltk(smoothing, samples, references):
    expected = [nltk_bleu(sample, references, smoothing) for sample in samples]
    assert bleu4(samples, references, smoothing).values == pytest.approx(expected, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", Smoothing)
@given(samples=st.lists(SENTENCE, min_size=2, max_size=6))
def test_self_bleu_equals_nltk(smoothing, samples):
    assert self_bleu4(samples, smoothing).values == pytest.approx(nltk_self_bleu(samples, smoothing), **EXACT)


@pytest.mark.slow
@given(samples=st.lists(SENTENCE, min_size=1, max_size=3), copies=st.integers(2, 3))
def test_identical_samples_are_references_of_each_other(samples, copies):
    repeated = samples * copies
    found = self_bleu4(repeated).values
    assert found == pytest.approx(nltk_self_bleu(repeated), **EXACT)
    assert found == pytest.approx(bleu4(repeated, samples).values, **EXACT)  # removing one copy changes nothing


@pytest.mark.slow
def test_bleu_of_longer_texts_equals_nltk():
    references, samples = zipf(150, seed=1), zipf(25, seed=2)
    values = bleu4(samples, references).values
    assert values == pytest.approx([nltk_bleu(sample, references) for sample in samples], **EXACT)
    assert np.count_nonzero(values > 0.01) > 5  # not all effectively zero
    values = self_bleu4(samples + references[:60]).values
    assert values == pytest.approx(nltk_self_bleu(samples + references[:60]), **EXACT)
    assert np.count_nonzero(values > 0.01) > 5


@pytest.mark.parametrize(
    ("sample", "references", "expected"),
    [
        # Lengths 2 and 6 are equally close to 4, and the shorter one counts: no brevity penalty.
        ("a b c d", ["a b c d e f", "a b"], 1.0),
        # 7 is closer to 5 than 2 is.
        ("a b c d e", ["a b c d e f g", "a b"], math.exp(1 - 7 / 5)),
        # Clipping: two of seven count, since no single reference has more; higher orders have 0.1 matches each.
        (
            "the the the the the the the",
            ["the cat is on the mat", "there is the cat"],
            (2 / 7 * 0.1 / 6 * 0.1 / 5 * 0.1 / 4) ** 0.25,
        ),
        # A single word: the denominators of the higher orders are 1.
        ("the", ["the cat"], math.exp(1 - 2 / 1) * 0.1**0.75),
        ("the", ["the"], 0.1**0.75),
        ("", ["the"], 0.0),
        ("", [""], 0.0),
        ("dog", ["the cat", ""], 0.0),
        # n-grams do not cross the end of a reference or of a sample.
        ("a b c d", ["a b", "c d"], (1 * 2 / 3 * 0.1 / 2 * 0.1) ** 0.25),
    ],
)
def test_bleu_computed_by_hand(sample, references, expected):
    # Samples on both sides, because no n-gram may cross into them.
    found = bleu4(["c d", sample, "a b c"], references, Smoothing.EPSILON).values[1]
    assert found == pytest.approx(expected, **EXACT)
    assert nltk_bleu(sample, references, Smoothing.EPSILON) == pytest.approx(expected, **EXACT)


def test_unsmoothed_bleu_without_a_common_4_gram_or_word_is_zero():
    values = bleu4(["a b c x", "x y"], ["a b c d"]).values
    assert values.tolist() == [0, 0]


def test_self_bleu_computed_by_hand():
    # The first sample has "a" twice, the others once: its second "a" is not a match. Of the lengths 2, 1 and 4, the
    # closest to 2 is 1, to 1 is 2, and to 4 is 2.
    values = self_bleu4(["a a", "a", "b b b a"], Smoothing.EPSILON).values
    assert values == pytest.approx(
        [
            (1 / 2 * 0.1 * 0.1 * 0.1) ** 0.25,
            math.exp(1 - 2) * 0.1**0.75,
            (1 / 4 * 0.1 / 3 * 0.1 / 2 * 0.1) ** 0.25,
        ],
        **EXACT,
    )


def test_scores_do_not_depend_on_the_order_or_on_other_samples():
    references, samples = zipf(40, seed=3), zipf(12, seed=4)
    metric = Bleu(references)
    together = metric.scores(samples)
    assert [metric.scores([sample]).mean for sample in samples] == together.values.tolist()
    assert bleu4(samples, references[::-1]).values.tolist() == together.values.tolist()
    assert self_bleu4(samples[::-1]).values[::-1].tolist() == self_bleu4(samples).values.tolist()
    assert together.mean == pytest.approx(sum(together.values) / 12)


def test_references_are_read_once():
    references, samples = zipf(1500, seed=5, words=2000), zipf(150, seed=6, words=2000)
    expected = nltk_bleu(samples[0], references)
    metric = Bleu(references)
    references.clear()
    assert metric.scores(samples).values[0] == pytest.approx(expected, **EXACT)


def test_distinct_n_pools_all_samples():
    samples = ["a b a b", "a b c", "d"]  # 2-grams: ab ba ab, ab bc
    assert distinct_n(samples, 1) == 4 / 8
    assert distinct_n(samples, 2) == 3 / 5
    assert distinct_n(samples, 4) == 1


def test_repetition_is_counted_within_a_sample():
    found = repetition(["a b a b a b", "a b c d", "a b", "", "x x x y y z"], n=2)
    assert found.fraction.values == pytest.approx([3 / 5, 0, 0, 0, 1 / 5])  # n-grams of other samples do not count
    assert found.longest_run.values.tolist() == [1, 1, 1, 0, 3]
    assert repetition(["the . the . the . the ."]).fraction.mean == pytest.approx(3 / 5)  # n = 4
    assert repetition(["a b c d", "a b c d"]).fraction.mean == 0


def test_entropies_computed_by_hand():
    found = token_entropy(["a a", "b b", "c d", ""])
    assert found.pooled == pytest.approx(2 * (1 / 3 * math.log(3)) + 2 * (1 / 6 * math.log(6)))
    assert found.within.values == pytest.approx([0, 0, math.log(2), 0])
    assert found.within.mean == pytest.approx(math.log(2) / 4)


@given(samples=SENTENCES.filter(any))
def test_pooled_entropy_equals_scipy(samples):
    words = " ".join(samples).split()
    assert token_entropy(samples).pooled == pytest.approx(entropy([words.count(word) for word in set(words)]))


METRICS: list[Callable[[list[str]], object]] = [
    lambda sentences: bleu4(sentences, ["a"]),
    lambda sentences: bleu4(["a"], sentences),
    self_bleu4,
    lambda sentences: distinct_n(sentences, 1),
    repetition,
    token_entropy,
]


@pytest.mark.parametrize("metric", METRICS)
def test_empty_lists_and_strings_are_rejected_in_one_line(metric):
    with pytest.raises(ValueError, match=r"^`\w+` must have length >= \d, got 0; .*$"):
        metric([])
    with pytest.raises(ValueError, match=r"^`\w+` must be a list of sentences, got the string 'a b'; .*$"):
        metric("a b")


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: self_bleu4(["a"]), "`samples` must have length >= 2, got 1"),
        (lambda: distinct_n(["a b", "c"], 3), "no sample has 3 or more words; give a smaller `n`"),
        (lambda: distinct_n(["a b"], 0), "`n` must be >= 1, got 0"),
        (lambda: repetition(["a b"], 0), "`n` must be >= 1, got 0"),
        (lambda: token_entropy(["", " "]), "`samples` must contain at least one word, got 2 empty sentences"),
    ],
)
def test_invalid_input_is_rejected(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()
