"""Measurements of generated text and of the model that generated it; `doctor` interprets them.

`examine` collects a `Case`: samples from a model, with their unmasking times, or from a file, and statistics of the
text that they should resemble. `measure` turns a case into `Symptoms`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.canvas import Generated
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.evaluation.metrics import distinct_n, entropy, repetition
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.generate import generate, stream
from diffusionbert.inference.score import estimate_nats, estimate_sequences
from diffusionbert.inference.tasks import Task
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.reporting import printable
from diffusionbert.samplers import SamplerConfig, SamplingRequest

Tokens = tuple[int, ...]
"""The token ids of a text, without special tokens."""
TENTHS = 10
TOP = 100
"""The number of frequent tokens that are compared; few samples suffice to estimate their frequencies."""
MAX_TOKENS = 2000
"""The largest number of tokens compared, because entropy and distinct n-grams depend on the size of a text."""
MIN_CORPUS = 2000
"""The smallest number of corpus tokens for a comparison with the stored frequencies; fewer have too much variance."""
OWN_TEXTS, MAX_SCORED, DRAWS = 8, 16, 4
"""Texts generated where there is no corpus, the most texts scored, and draws per text: enough to tell a trained network
from an untrained one."""
BARELY_TRAINED = 0.9
"""Of the unigram model's nats on the ids that a network generated: one that needs more has not learned which tokens
follow each other."""
MIN_POSITIONS = 8
"""The fewest positions of a sample for unmasking times: samplers that skip steps report time 0 at the end of each."""
MIN_TOKENS, MIN_SAMPLES = 120, 8
"""With fewer, frequencies and lengths are not judged."""


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """Token counts and lengths of the text that samples should resemble."""

    counts: Tensor
    length_histogram: Tensor | None

    @classmethod
    def of(cls, sentences: Sequence[Tokens], size: int) -> Reference:
        lengths = torch.tensor([len(sentence) for sentence in sentences])
        return cls(torch.from_numpy(_counts(sentences, size)), lengths.bincount())

    @cached_property
    def fractions(self) -> NDArray[np.float64]:
        """The relative frequency of each token."""
        return _fractions(self.counts.numpy())

    @cached_property
    def frequent(self) -> NDArray[np.int64]:
        """The ids of the most frequent tokens."""
        return np.argsort(-self.fractions, kind="stable")[:TOP]

    def distance(self, sentences: Iterable[Tokens]) -> float:
        """The distance of the token frequencies of sentences: 0 if equal, 1 if no frequent token occurs.

        Total variation over the frequent tokens and the rest as one class, divided by the mass of the frequent ones.
        """
        own = self.fractions[self.frequent]
        other = _fractions(_counts(sentences, len(self.fractions)))[self.frequent]
        return float(np.abs(own - other).sum() + abs(own.sum() - other.sum())) / 2 / float(own.sum())

    def entropy(self, num_tokens: int) -> float:
        """The expected entropy, in nats, of a sample of `num_tokens` tokens, which is below that of the whole."""
        rng = np.random.default_rng(0)
        return float(np.mean([entropy(rng.multinomial(num_tokens, self.fractions)) for _ in range(4)]))


@final
@dataclass(frozen=True, eq=False)
class Case:
    """Samples and what is known of their model; only the samples are required."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]
    stored: Reference | None = None
    """Statistics of the training corpus, stored with the model."""
    corpus: tuple[Tokens, ...] = ()
    """Sentences that the samples should resemble, instead of the training corpus."""
    generated: tuple[Tokens, ...] = ()
    """The samples as generated token ids, before decoding."""
    unmask_times: tuple[tuple[float, ...], ...] = ()
    """The unmasking time of each position of each sample, as a fraction of the sampling; see `unmask_times`."""
    expected_late: float = 1 / TENTHS
    """The fraction of positions that the schedule unmasks in the last tenth of the sampling."""
    sampling: SamplingRequest | None = None
    """The sampling settings, if known."""
    has_given_length: bool = False
    """Whether the user set the lengths of the samples."""
    network_nats: float | None = None
    """The network's nats per token on the corpus, or on text that it generated."""
    network_texts: str | None = None
    """A description of these texts."""
    unigram_nats: float | None = None
    """The nats per token of the unigram model on the same texts."""
    generated_nats: float | None = None
    """The network's nats per token on the ids that it generated, which no tokenizer has touched."""
    limits: tuple[str, ...] = ()
    """What the model cannot do, from its card."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("there are no samples; give a file of samples, or generate at least one")

    @cached_property
    def reference(self) -> Reference | None:
        """The text that the samples should resemble: the corpus, or else the training corpus."""
        return Reference.of(self.corpus, self.vocabulary.size) if any(self.corpus) else self.stored


@final
@dataclass(frozen=True)
class Symptoms:
    """The measurements of a case; None where a measurement is not available."""

    samples: int
    tokens: int
    mean_length: float
    reference_length: float | None
    length_distance: float | None
    """The Wasserstein-1 distance between the length histograms, in tokens."""
    one_token_fraction: float
    reference_one_token_fraction: float | None
    entropy: float
    """The entropy of the tokens of the first samples, in nats."""
    reference_entropy: float | None
    """The expected entropy of as many tokens of the reference."""
    distinct_2: float | None
    reference_distinct_2: float | None
    frequent_fraction: float | None
    """The fraction of tokens that are among the most frequent ones of the reference."""
    reference_frequent_fraction: float | None
    repetition: float
    """The fraction of 4-grams that occur earlier in the same sample."""
    long_runs: float
    """The fraction of samples with a token four times or more in a row."""
    duplicates: float
    """The fraction of samples that are duplicates of another one."""
    special_tokens: int
    """The number of special ids among the generated tokens, and of names of special tokens in the texts."""
    unknown_fraction: float
    reference_unknown_fraction: float | None
    network_nats: float | None
    network_texts: str | None
    unigram_nats: float | None
    corpus_distance: float | None
    """The distance of the corpus from the stored frequencies; see `Reference.distance`."""
    brevity: float | None
    """Mean characters per token weighted by frequency, over the unweighted mean: frequent tokens are short."""
    round_trip: float | None
    """The fraction of generated tokens that survive decoding and encoding; None if few of them are frequent ones."""
    unmask_histogram: tuple[float, ...] | None
    """The fraction of positions unmasked in each tenth of the sampling."""

    @property
    def are_enough(self) -> bool:
        """Whether frequencies and lengths can be judged."""
        return self.samples >= MIN_SAMPLES and self.tokens >= MIN_TOKENS


# ---- from a model to a case -----------------------------------------------------------------------------------------


def examine(
    model: Engine,
    task: Task,
    sampling: SamplingRequest,
    samples: Sequence[str] = (),
    corpus: Sequence[str] = (),
    advance: Callable[[int], None] = lambda num_samples: None,
) -> Case:
    """Collects a case from the given samples or, if there are none, from samples that the model generates.

    The samples should resemble the corpus or, without one, the training corpus.
    """
    texts, generated, times = list(samples), [], []
    for index in range(0 if samples else task.number):
        # One sample at a time: on a CPU this is faster than a batch, in which all wait for the longest.
        path = list(stream(model, replace(task, number=1, seed=task.seed + index), sampling))
        texts.append(path[-1].text)
        generated.append(path[-1].tokens)
        times.append(unmask_times((state.time, [piece is None for piece in state.pieces]) for state in path))
        advance(index + 1)
    objective, counts = model.config.objective, model.statistics.counts
    stored = Reference(counts, model.length_histogram) if bool(counts.any()) else None
    last = torch.tensor([1 / TENTHS], dtype=torch.float64)
    schedule = objective.schedule
    return Case(
        model.vocabulary,
        tuple(texts),
        stored,
        encode(model.vocabulary, corpus),
        tuple(generated),
        tuple(times),
        1 / TENTHS if schedule is None else 1 - float(schedule.survival(last, torch.ones_like(last))),
        None if samples else replace(sampling, sampler=objective.choose_sampler(sampling.sampler)),
        not samples and task.length is not None,
        *_network_nats(model, corpus, stored, task.seed),
        _generated_nats(model, generated, task.seed),
        limits_of(model.folder),
    )


def limits_of(folder: Path) -> tuple[str, ...]:
    """The limits that a model's card lists; none if it has no such section."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    section = re.search(r"^## Limits\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    items = re.split(r"^- ", section[1], flags=re.MULTILINE)[1:] if section else []
    return tuple(printable(" ".join(item.split())) for item in items)


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> tuple[Tokens, ...]:
    """The token ids of each text, without special tokens."""
    return tuple(map(tuple, vocabulary.own(texts)))


def unmask_times(states: Iterable[tuple[float, Sequence[bool]]]) -> tuple[float, ...]:
    """The last unmasking time of each position, as a fraction of the sampling (0 is its start, 1 its end).

    A state is its time (from 1 down to 0) and which positions are masked. Positions that were never masked, or are
    still masked, have no value.
    """
    found: dict[int, float] = {}
    before: Sequence[bool] = ()
    for time, masked in states:
        pairs = enumerate(zip(before, masked, strict=False))
        found |= {position: 1 - time for position, (was, now) in pairs if was and not now}
        before = masked
    return tuple(found[position] for position, is_masked in enumerate(before) if position in found and not is_masked)


def _network_nats(
    model: Engine, corpus: Sequence[str], stored: Reference | None, seed: int
) -> tuple[float | None, str | None, float | None]:
    """The network's nats per token, a description of the scored texts, and the unigram model's nats per token.

    Without a corpus, text that the network generates at temperature 1 is scored, on which an untrained network has high
    nats, too; the unigram nats are then the entropy of the stored token counts.
    """
    if not model.config.objective.scoring_quantities(model.config.time).available:
        return None, None, None
    task, sampling = Task(OWN_TEXTS, min(12, model.max_length), seed=seed), SamplerConfig(steps=32)
    texts = corpus or [one.text for one in generate(model, task, SamplingRequest(config=sampling))]
    tokens = encode(model.vocabulary, texts)
    chosen = [index for index, own in enumerate(tokens) if 0 < len(own) <= model.max_length][:MAX_SCORED]
    if len(chosen) < 2:
        return None, None, None
    described = f"{len(chosen)} {'sentences of the corpus' if corpus else 'generated texts'}, {DRAWS} draws each"
    budget = EstimationBudget(precision=None, max_draws=DRAWS, strata=2, seed=seed)  # to a few tenths of a nat
    nats = estimate_nats(model, [texts[index] for index in chosen], budget).nats_per_token
    if stored is None or not corpus:
        return nats, described, None if stored is None else entropy(stored.counts.numpy())
    smoothed = _fractions((stored.counts + 1).numpy() * model.statistics.allowed.numpy())
    return nats, described, -float(np.log(smoothed[[token for index in chosen for token in tokens[index]]]).mean())


def _generated_nats(model: Engine, generated: Sequence[Tokens], seed: int) -> float | None:
    """The network's nats per token on generated ids; None if it has no likelihood or there are too few of them."""
    chosen = [list(tokens) for tokens in generated if 0 < len(tokens) <= model.max_length][:MAX_SCORED]
    if len(chosen) < 2 or not model.config.objective.scoring_quantities(model.config.time).available or model.paired:
        return None
    budget = EstimationBudget(precision=None, max_draws=DRAWS, strata=2, seed=seed)
    return estimate_sequences(model, Generated(model.vocabulary, chosen), budget).nats_per_token


# ---- from a case to symptoms ----------------------------------------------------------------------------------------


def measure(case: Case) -> Symptoms:
    """Measures all that the case allows."""
    samples, reference, stored = encode(case.vocabulary, case.texts), case.reference, case.stored
    first = _first(samples, MAX_TOKENS)
    tokens = [token for sample in first for token in sample]
    repeated = repetition(_as_words(samples)) if any(samples) else None
    lengths, unknown = np.bincount([len(sample) for sample in samples], minlength=2), case.vocabulary.unk_id
    expected = None if reference is None or reference.length_histogram is None else reference.length_histogram.numpy()
    is_large = sum(map(len, case.corpus)) >= MIN_CORPUS
    return Symptoms(
        samples=len(samples),
        tokens=sum(map(len, samples)),
        mean_length=_mean(lengths),
        reference_length=None if expected is None else _mean(expected),
        length_distance=None if expected is None else _length_distance(lengths, expected),
        one_token_fraction=float(_fractions(lengths)[:2].sum()),
        reference_one_token_fraction=None if expected is None else float(_fractions(expected)[:2].sum()),
        entropy=entropy(np.bincount(tokens)) if tokens else 0.0,
        reference_entropy=None if reference is None or not tokens else reference.entropy(len(tokens)),
        distinct_2=_distinct(first),
        reference_distinct_2=_distinct(_first(case.corpus, len(tokens))),
        frequent_fraction=None if reference is None else _fraction(tokens, reference.frequent),
        reference_frequent_fraction=None if reference is None else float(reference.fractions[reference.frequent].sum()),
        repetition=0.0 if repeated is None else repeated.fraction.mean,
        long_runs=0.0 if repeated is None else float((repeated.longest_run.values >= 4).mean()),
        duplicates=1 - len(set(case.texts)) / len(case.texts),
        special_tokens=_num_special(case),
        unknown_fraction=0.0 if unknown is None else _fraction(tokens, [unknown]),
        reference_unknown_fraction=None
        if reference is None or unknown is None
        else float(reference.fractions[unknown]),
        network_nats=case.network_nats,
        network_texts=case.network_texts,
        unigram_nats=case.unigram_nats,
        corpus_distance=None if stored is None or not is_large else stored.distance(case.corpus),
        brevity=None if stored is None else _brevity(case.vocabulary, stored),
        round_trip=None if stored is None else _round_trip(case, samples, stored),
        unmask_histogram=_histogram(case.unmask_times),
    )


def _first(sentences: tuple[Tokens, ...], num_tokens: int) -> tuple[Tokens, ...]:
    """The first sentences that have `num_tokens` tokens in total, or all."""
    return sentences[: int(np.searchsorted(np.cumsum([len(one) for one in sentences]), num_tokens)) + 1]


def _counts(sentences: Iterable[Tokens], size: int) -> NDArray[np.int64]:
    return np.bincount([token for sentence in sentences for token in sentence], minlength=size)


def _fractions(counts: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(counts / counts.sum(), np.float64)


def _fraction(tokens: list[int], among: Sequence[int] | NDArray[np.int64]) -> float:
    return float(np.isin(tokens, among).mean()) if tokens else 0.0


def _mean(histogram: NDArray[Any]) -> float:
    return float((_fractions(histogram) * np.arange(len(histogram))).sum())


def _length_distance(lengths: NDArray[Any], expected: NDArray[Any]) -> float:
    size = max(len(lengths), len(expected))
    p, q = (np.pad(_fractions(counts), (0, size - len(counts))) for counts in (lengths, expected))
    return float(np.abs(np.cumsum(p - q)).sum())


def _as_words(sentences: Iterable[Tokens]) -> list[str]:
    """Ids as words, for metrics that split at whitespace."""
    return [" ".join(map(str, sentence)) for sentence in sentences]


def _distinct(sentences: tuple[Tokens, ...]) -> float | None:
    words = _as_words(sentence for sentence in sentences if len(sentence) > 1)
    return distinct_n(words, 2) if words else None


def _num_special(case: Case) -> int:
    special, names = case.vocabulary.special.tolist(), set(map(str, case.vocabulary.tokenizer.all_special_tokens))
    num_ids = sum(int(special[token]) for sample in case.generated for token in sample)
    return num_ids + sum(text.count(name) for text in case.texts for name in names)


def _brevity(vocabulary: Vocabulary, stored: Reference) -> float | None:
    """Zipf's law of abbreviation; None if fewer than 1000 tokens occur, where it may fail by chance."""
    counts = stored.counts[: vocabulary.size] * vocabulary.allowed
    occurring = counts.nonzero()[:, 0]
    if len(occurring) < 1000:
        return None
    pieces: Any = vocabulary.tokenizer.convert_ids_to_tokens(occurring.tolist())
    characters = np.array([len(piece.removeprefix("##")) for piece in pieces])
    return float((characters * _fractions(counts[occurring].numpy())).sum() / characters.mean())


def _round_trip(case: Case, encoded: tuple[Tokens, ...], stored: Reference) -> float | None:
    generated = case.generated
    if not any(generated):
        return None
    # A barely trained network draws tokens by their frequencies, and such pieces do not make words, either.
    unigram = -float(
        np.log(_fractions(stored.counts.numpy() + 1)[[one for sample in generated for one in sample]]).mean()
    )
    if case.generated_nats is not None and case.generated_nats > BARELY_TRAINED * unigram:
        return None
    frequent, fractions = stored.frequent, _fractions(_counts(generated, len(stored.fractions)))
    # Random tokens of an untrained network may be encoded differently even with the correct vocabulary.
    if fractions[frequent].sum() < stored.fractions[frequent].sum() / 2:
        return None
    common = (Counter(before) & Counter(after) for before, after in zip(generated, encoded, strict=True))
    return sum(counts.total() for counts in common) / sum(map(len, generated))


def _histogram(unmask_times: tuple[tuple[float, ...], ...]) -> tuple[float, ...] | None:
    times = [time for sample in unmask_times if len(sample) >= MIN_POSITIONS for time in sample]
    if not times:
        return None
    # Intervals are closed on the right: a position unmasked at 0.1 belongs to the first tenth.
    tenths = np.clip(np.ceil(np.array(times) * TENTHS - 1e-9), 1, TENTHS).astype(np.int64) - 1
    return tuple(_fractions(np.bincount(tenths, minlength=TENTHS)).tolist())
