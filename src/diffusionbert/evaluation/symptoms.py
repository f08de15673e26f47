"""Measurements of generated text and of the model that generated it.

`examine` collects a `Case`: samples from a model, with their unmasking times, or from a file, and statistics of the
text that they should resemble. `measure` turns a case into `Symptoms`. They are separate, so that samples, unmasking
times or counts from other programs can be measured, too. This module does not interpret the numbers; `doctor` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.evaluation.metrics import distinct_n, repetition
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.generate import generate, stream
from diffusionbert.inference.score import estimate_nats
from diffusionbert.inference.tasks import StreamState, Task
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.samplers import SamplerConfig, SamplingRequest

Row = tuple[int, ...]
"""The token ids of a sentence, without special tokens."""
TENTHS = 10
TOP = 100
"""The number of frequent tokens that are compared; few samples suffice to estimate their frequencies."""
MOST_TOKENS = 2000
"""The largest number of tokens compared, because entropy and distinct n-grams depend on the size of a text."""
LEAST_CORPUS = 2000
"""The smallest number of corpus tokens for a comparison with the stored frequencies; fewer have too much variance."""
OWN_TEXTS, MOST_SCORED, DRAWS = 8, 16, 4
"""Texts generated where there is no corpus, the most texts scored, and draws per text: enough to tell a trained network
from an untrained one."""
LEAST_PLACES = 8
"""The fewest positions of a sample for unmasking times: samplers that skip steps report time 0 at the end of each."""


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """Statistics of the text that samples should resemble, and its sentences if available."""

    counts: Tensor
    length_histogram: Tensor | None
    rows: tuple[Row, ...] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[Row], size: int) -> Reference:
        """Counts the tokens and lengths of sentences."""
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.long)
        return cls(tokens.bincount(minlength=size), torch.tensor([len(row) for row in rows]).bincount(), tuple(rows))

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """The relative frequency of each token."""
        return _shares(self.counts.numpy())

    @cached_property
    def frequent(self) -> NDArray[np.int64]:
        """The ids of the most frequent tokens."""
        return np.argsort(-self.shares, kind="stable")[:TOP]

    def distance(self, rows: Iterable[Row]) -> float:
        """The distance of the token frequencies of sentences: 0 if equal, 1 if no frequent token occurs.

        Total variation over the frequent tokens and the rest as one class, divided by the mass of the frequent ones.
        """
        own = self.shares[self.frequent]
        other = _shares(_counts(rows, len(self.shares)))[self.frequent]
        return float(np.abs(own - other).sum() + abs(own.sum() - other.sum())) / 2 / float(own.sum())

    def entropy(self, num_tokens: int) -> float:
        """The expected entropy, in nats, of a sample of `num_tokens` tokens, which is below that of the whole."""
        rng = np.random.default_rng(0)
        return float(np.mean([_entropy(rng.multinomial(num_tokens, self.shares)) for _ in range(4)]))


@final
@dataclass(frozen=True, eq=False)
class Case:
    """The input of `measure`; only the samples are required."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]
    reference: Reference | None = None
    """Statistics of the text that the samples should resemble."""
    stored: Reference | None = None
    """Statistics of the training corpus, stored with the model."""
    corpus: tuple[Row, ...] = ()
    """Sentences of a corpus like the training corpus, encoded with the vocabulary."""
    written: tuple[Row, ...] = ()
    """The samples as generated token ids, before decoding."""
    unmask_times: tuple[tuple[float, ...], ...] = ()
    """The unmasking time of each position of each sample, as a fraction of the sampling; see `unmask_times`."""
    expected_late: float = 1 / TENTHS
    """The fraction of positions that the schedule unmasks in the last tenth of the sampling."""
    sampling: SamplingRequest | None = None
    """The sampling settings, if known."""
    length_asked: bool = False
    """Whether the user set the lengths of the samples."""
    network_nats: float | None = None
    """The network's nats per token on the corpus, or on text that it generated."""
    network_texts: str | None = None
    """A description of these texts."""
    unigram_nats: float | None = None
    """The nats per token of the unigram model on the same texts."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("there are no samples; give a file of samples, or generate at least one")


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
    one_token_share: float
    reference_one_token_share: float | None
    entropy: float
    """The entropy of the tokens of the first samples, in nats."""
    reference_entropy: float | None
    """The expected entropy of as many tokens of the reference."""
    distinct_2: float | None
    reference_distinct_2: float | None
    frequent_share: float | None
    """The fraction of tokens that are among the most frequent ones of the reference."""
    reference_frequent_share: float | None
    repetition: float
    """The fraction of 4-grams that occur earlier in the same sample."""
    long_runs: float
    """The fraction of samples with a token four times or more in a row."""
    duplicates: float
    """The fraction of samples that are duplicates of another one."""
    special_tokens: int
    """The number of masked positions and names of special tokens left in the samples."""
    unknown_share: float
    reference_unknown_share: float | None
    network_nats: float | None
    network_texts: str | None
    """A description of the texts that `network_nats` refers to."""
    unigram_nats: float | None
    corpus_distance: float | None
    """The distance of the corpus from the stored frequencies; see `Reference.distance`."""
    brevity: float | None
    """Mean characters per token weighted by frequency, over the unweighted mean: frequent tokens are short."""
    round_trip: float | None
    """The fraction of generated tokens that survive decoding and encoding; None if few of them are frequent ones."""
    unmask_histogram: tuple[float, ...] | None
    """The fraction of positions unmasked in each tenth of the sampling."""


# ---- from a model to a case -----------------------------------------------------------------------------------------


def examine(
    model: Engine,
    task: Task,
    sampling: SamplingRequest,
    samples: Sequence[str] = (),
    corpus: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> Case:
    """Collects a case from the given samples or, if there are none, from samples that the model generates.

    Args:
        model: The model to examine.
        task: How many samples to generate, and of which length.
        sampling: How to generate them.
        samples: Samples to use instead.
        corpus: Sentences that the samples should resemble, instead of the training corpus.
        advance: Progress callback, called once per generated sample.
    """
    vocabulary, size = model.vocabulary, len(model.statistics.counts)
    paths = [] if samples else [_path(model, task, sampling, index, advance) for index in range(task.number)]
    stored = Reference(model.statistics.counts, model.length_histogram) if bool(model.statistics.counts.any()) else None
    rows = read(vocabulary, corpus)
    schedule = getattr(model.config.objective, "schedule", None)
    time = torch.tensor([1 / TENTHS], dtype=torch.float64)
    network_nats, network_texts, unigram_nats = _network(model, corpus, stored, task.seed)
    return Case(
        vocabulary,
        tuple(samples) or tuple(path[-1].text for path in paths),
        Reference.of_rows(rows, size) if any(rows) else stored,
        stored,
        rows,
        tuple(path[-1].tokens for path in paths),
        tuple(
            unmask_times((moment.time, [piece is None for piece in moment.pieces]) for moment in path) for path in paths
        ),
        1 / TENTHS if schedule is None else 1 - float(schedule.survival(time, torch.ones_like(time))),
        None if samples else replace(sampling, sampler=model.config.objective.choose_sampler(sampling.sampler)),
        not samples and task.length is not None,
        network_nats,
        network_texts,
        unigram_nats,
    )


def read(vocabulary: Vocabulary, texts: Sequence[str]) -> tuple[Row, ...]:
    """The token ids of each text, without special tokens."""
    return tuple(map(tuple, vocabulary.own(texts)))


def unmask_times(states: Iterable[tuple[float, Sequence[bool]]]) -> tuple[float, ...]:
    """The last unmasking time of each position, as a fraction of the sampling (0 is its start, 1 its end).

    Args:
        states: For each state, its time (from 1 down to 0) and which positions are masked.

    Returns:
        One value per position; positions that were never masked, or are still masked, have none.
    """
    found: dict[int, float] = {}
    before: Sequence[bool] = ()
    for time, masked in states:
        found |= {
            position: 1 - time
            for position, (was_masked, is_masked) in enumerate(zip(before, masked, strict=False))
            if was_masked and not is_masked
        }
        before = masked
    return tuple(found[position] for position, is_masked in enumerate(before) if position in found and not is_masked)


def _path(
    model: Engine, task: Task, sampling: SamplingRequest, index: int, advance: Callable[[], None]
) -> list[StreamState]:
    # One sample at a time: on a CPU this is faster than a batch, in which all wait for the longest.
    path = list(stream(model, replace(task, number=1, seed=task.seed + index), sampling))
    advance()
    return path


def _network(
    model: Engine, corpus: Sequence[str], stored: Reference | None, seed: int
) -> tuple[float | None, str | None, float | None]:
    """The network's nats per token, a description of the scored texts, and the unigram model's nats per token.

    Without a corpus, text that the network generates at temperature 1 is scored, on which an untrained network has high
    nats, too; the unigram nats are then the entropy of the stored token counts.
    """
    if not model.config.objective.scoring_quantities(model.config.time).available:
        return None, None, None
    texts = corpus or [
        written.text
        for written in generate(
            model,
            Task(OWN_TEXTS, min(12, model.max_length), seed=seed),
            SamplingRequest(config=SamplerConfig(steps=32)),
        )
    ]
    rows = read(model.vocabulary, texts)
    chosen = [index for index, row in enumerate(rows) if 0 < len(row) <= model.max_length][:MOST_SCORED]
    if len(chosen) < 2:
        return None, None, None
    described = f"{len(chosen)} {'sentences of the corpus' if corpus else 'generated texts'}, {DRAWS} draws each"
    budget = EstimationBudget(precision=None, max_draws=DRAWS, strata=2, seed=seed)  # to a few tenths of a nat
    nats = estimate_nats(model, [texts[index] for index in chosen], budget).nats_per_token
    if stored is None or not corpus:
        return nats, described, None if stored is None else _entropy(stored.counts.numpy())
    smoothed = _shares((stored.counts + 1).numpy() * model.statistics.allowed.numpy())
    return nats, described, -float(np.log(smoothed[[token for index in chosen for token in rows[index]]]).mean())


# ---- from a case to symptoms ----------------------------------------------------------------------------------------


def measure(case: Case) -> Symptoms:
    """Measures all that the case allows."""
    rows, reference = read(case.vocabulary, case.texts), case.reference
    first = _first(rows)
    words = [" ".join(map(str, row)) for row in rows]  # ids as words, for metrics that split at whitespace
    repeated = repetition(words) if any(rows) else None
    tokens = [token for row in first for token in row]
    lengths = np.bincount([len(row) for row in rows], minlength=2)
    expected = None if reference is None or reference.length_histogram is None else reference.length_histogram.numpy()
    unknown, is_large = case.vocabulary.unk_id, sum(map(len, case.corpus)) >= LEAST_CORPUS
    return Symptoms(
        samples=len(rows),
        tokens=sum(map(len, rows)),
        mean_length=_mean(lengths),
        reference_length=None if expected is None else _mean(expected),
        length_distance=None if expected is None else _length_distance(lengths, expected),
        one_token_share=_at_most_one(lengths),
        reference_one_token_share=None if expected is None else _at_most_one(expected),
        entropy=_entropy(np.bincount(tokens)) if tokens else 0.0,
        reference_entropy=None if reference is None or not tokens else reference.entropy(len(tokens)),
        distinct_2=_distinct(first),
        reference_distinct_2=None if reference is None else _distinct(_first(reference.rows, len(tokens))),
        frequent_share=None if reference is None else _share(tokens, reference.frequent.tolist()),
        reference_frequent_share=None if reference is None else float(reference.shares[reference.frequent].sum()),
        repetition=0.0 if repeated is None else repeated.share.mean,
        long_runs=0.0 if repeated is None else float((repeated.longest_run.values >= 4).mean()),
        duplicates=1 - len(set(case.texts)) / len(case.texts),
        special_tokens=_num_special(case),
        unknown_share=0.0 if unknown is None else _share(tokens, [unknown]),
        reference_unknown_share=None if reference is None or unknown is None else float(reference.shares[unknown]),
        network_nats=case.network_nats,
        network_texts=case.network_texts,
        unigram_nats=case.unigram_nats,
        corpus_distance=None if case.stored is None or not is_large else case.stored.distance(case.corpus),
        brevity=None if case.stored is None else _brevity(case.vocabulary, case.stored),
        round_trip=_round_trip(case, rows),
        unmask_histogram=_histogram(case.unmask_times),
    )


def _first(rows: tuple[Row, ...], num_tokens: int = MOST_TOKENS) -> tuple[Row, ...]:
    """The first sentences that have `num_tokens` tokens in total, or all."""
    ends = np.cumsum([len(row) for row in rows])
    return rows[: int(np.searchsorted(ends, num_tokens)) + 1]


def _counts(rows: Iterable[Row], size: int) -> NDArray[np.int64]:
    return np.bincount([token for row in rows for token in row], minlength=size)


def _shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(counts / counts.sum(), np.float64)


def _entropy(counts: NDArray[Any]) -> float:
    shares = _shares(counts[counts > 0])
    return -float((shares * np.log(shares)).sum())


def _mean(histogram: NDArray[Any]) -> float:
    return float((_shares(histogram) * np.arange(len(histogram))).sum())


def _at_most_one(histogram: NDArray[Any]) -> float:
    return float(_shares(histogram)[:2].sum())


def _length_distance(lengths: NDArray[Any], expected: NDArray[Any]) -> float:
    size = max(len(lengths), len(expected))
    p, q = (np.pad(_shares(counts), (0, size - len(counts))) for counts in (lengths, expected))
    return float(np.abs(np.cumsum(p - q)).sum())


def _distinct(rows: tuple[Row, ...]) -> float | None:
    words = [" ".join(map(str, row)) for row in rows if len(row) > 1]
    return distinct_n(words, 2) if words else None


def _share(tokens: list[int], wanted: Sequence[int]) -> float:
    among = set(wanted)
    return sum(token in among for token in tokens) / max(1, len(tokens))


def _num_special(case: Case) -> int:
    """The number of special ids in the generated tokens, and of their names in the texts."""
    names = {str(name) for name in case.vocabulary.tokenizer.all_special_tokens}
    special = case.vocabulary.special.tolist()
    num_ids = sum(int(special[token]) for row in case.written for token in row)
    return num_ids + sum(text.count(name) for text in case.texts for name in names)


def _brevity(vocabulary: Vocabulary, stored: Reference) -> float | None:
    """Zipf's law of abbreviation; None if fewer than 1000 tokens occur, where it may fail by chance."""
    counts = stored.counts[: vocabulary.size] * vocabulary.allowed
    occurring = counts.nonzero()[:, 0]
    if len(occurring) < 1000:
        return None
    pieces: Any = vocabulary.tokenizer.convert_ids_to_tokens(occurring.tolist())
    characters = np.array([len(piece.removeprefix("##")) for piece in pieces])
    return float((characters * _shares(counts[occurring].numpy())).sum() / characters.mean())


def _round_trip(case: Case, rows: tuple[Row, ...]) -> float | None:
    if case.stored is None or not any(case.written):
        return None
    frequent = case.stored.frequent
    written = _shares(_counts(case.written, len(case.stored.shares)))
    # Random tokens of an untrained network may be encoded differently even with the correct vocabulary.
    if written[frequent].sum() < case.stored.shares[frequent].sum() / 2:
        return None
    common = (Counter(before) & Counter(after) for before, after in zip(case.written, rows, strict=True))
    return sum(sum(counts.values()) for counts in common) / sum(map(len, case.written))


def _histogram(unmask_times: tuple[tuple[float, ...], ...]) -> tuple[float, ...] | None:
    times = [time for row in unmask_times if len(row) >= LEAST_PLACES for time in row]
    if not times:
        return None
    # Intervals are closed on the right: a position unmasked at 0.1 belongs to the first tenth.
    tenths = np.clip(np.ceil(np.array(times) * TENTHS - 1e-9), 1, TENTHS).astype(np.int64) - 1
    return tuple(_shares(np.bincount(tenths, minlength=TENTHS)).tolist())
