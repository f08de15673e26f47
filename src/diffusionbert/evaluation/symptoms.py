"""What can be seen of generated text and of the model that wrote it, in numbers.

`examine` gathers a `Case`: what a model writes and when, or samples from a file, and what the text they should resemble
is like. `measure` turns it into `Symptoms`. The two are apart, so that whatever has samples, reveal times or counts can
be looked at, also what this package did not write. What numbers mean is `doctor`'s.
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
from diffusionbert.inference.tasks import StreamState, Task
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.model import Model
from diffusionbert.samplers import SamplerConfig, SamplingRequest

Row = tuple[int, ...]
"""A sentence's own tokens."""
TENTHS = 10
TOP = 100
"""So many of the most frequent tokens are looked at: few samples suffice to know their shares."""
MOST_TOKENS = 2000
"""Entropies and distinct n-grams depend on the size of a text, so no more is compared."""
LEAST_CORPUS = 2000
"""Tokens of a corpus that are needed to compare its frequencies with stored ones: fewer scatter too much."""
OWN_TEXTS, MOST_SCORED, DRAWS = 8, 16, 4
"""So many texts the model writes where there is no corpus, so many at most are scored, with so many draws each: enough
to tell a network that has learned from one that has not."""
LEAST_PLACES = 8
"""Samples with fewer places are left out of the reveal times: samplers that skip say 0 for the end of each."""


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """What text is like that samples should resemble: its counts and lengths, and its sentences if they are at hand."""

    counts: Tensor
    length_histogram: Tensor | None
    rows: tuple[Row, ...] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[Row], size: int) -> Reference:
        """Counts sentences."""
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
        """How other the frequencies of rows are: 0, as this text's; 1, its frequent tokens do not occur at all.

        ½ Σ |difference of shares| over the frequent tokens and the rest as one, over what the frequent ones have.
        """
        own = self.shares[self.frequent]
        other = _shares(_counts(rows, len(self.shares)))[self.frequent]
        return float(np.abs(own - other).sum() + abs(own.sum() - other.sum())) / 2 / float(own.sum())

    def entropy(self, num_tokens: int) -> float:
        """The expected entropy, in nats, of so many of its tokens: few show less than all."""
        chance = np.random.default_rng(0)
        return float(np.mean([_entropy(chance.multinomial(num_tokens, self.shares)) for _ in range(4)]))


@final
@dataclass(frozen=True, eq=False)
class Case:
    """What there is to look at; only samples must be there."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]
    reference: Reference | None = None
    """What they should resemble."""
    stored: Reference | None = None
    """What the model says its training corpus was like."""
    corpus: tuple[Row, ...] = ()
    """Sentences of a corpus that is said to be like it, as the vocabulary reads them."""
    written: tuple[Row, ...] = ()
    """The samples' tokens as the network wrote them, before they became text."""
    unmask_times: tuple[tuple[float, ...], ...] = ()
    """For each sample, how far on its way, from 0 to 1, each place was written for good; see `unmask_times`."""
    expected_late: float = 1 / TENTHS
    """The share of places that the schedule writes in the last tenth of the way."""
    sampling: SamplingRequest | None = None
    """How the samples were made, if that is known."""
    length_asked: bool = False
    """Whether someone wanted the samples to have the lengths they have."""
    network_nats: float | None = None
    """What the network needs for a token of the corpus, or of what it writes itself."""
    network_texts: str | None = None
    """Which texts those are, in words."""
    unigram_nats: float | None = None
    """What frequencies alone need for the same."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("there are no samples to look at; give a file of them, or let at least one be written")


@final
@dataclass(frozen=True)
class Symptoms:
    """A case in numbers; what cannot be known is None. Shares are of samples, of tokens, or of places."""

    samples: int
    tokens: int
    mean_length: float
    reference_length: float | None
    length_distance: float | None
    """Tokens to add or remove per sentence to make the histograms equal (Wasserstein-1)."""
    one_token_share: float
    reference_one_token_share: float | None
    entropy: float
    """Of the tokens of the first samples, in nats."""
    reference_entropy: float | None
    """Of as many tokens of the reference."""
    distinct_2: float | None
    reference_distinct_2: float | None
    frequent_share: float | None
    """Of the reference's most frequent tokens."""
    reference_frequent_share: float | None
    repetition: float
    """4-grams that stood earlier in the same sample, over all."""
    long_runs: float
    """Samples in which a token stands four times or more in a row."""
    duplicates: float
    """Samples that occurred before."""
    special_tokens: int
    """Hidden places and names of special tokens that are left in the samples."""
    unknown_share: float
    reference_unknown_share: float | None
    network_nats: float | None
    network_texts: str | None
    """The texts of which the network's nats are, in words."""
    unigram_nats: float | None
    corpus_distance: float | None
    """How other the frequencies of the corpus are than the stored ones; see `Reference.distance`."""
    brevity: float | None
    """The mean characters of tokens that occur, weighted by frequency over unweighted: frequent ones are short."""
    round_trip: float | None
    """Generated tokens that are still there when the text is encoded again; None where that says nothing."""
    unmask_histogram: tuple[float, ...] | None
    """The share of places written in each tenth of the way."""


# ---- from a model to a case -----------------------------------------------------------------------------------------


def examine(
    model: Model,
    task: Task,
    sampling: SamplingRequest,
    samples: Sequence[str] = (),
    corpus: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> Case:
    """Takes samples, or lets the model write as many as the task says; `advance` is told of each."""
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
    """The own tokens of each text."""
    return tuple(map(tuple, vocabulary.own(texts)))


def unmask_times(states: Iterable[tuple[float, Sequence[bool]]]) -> tuple[float, ...]:
    """How far on its way each place was written for good, from a time (1 to 0) and which places are hidden, by state.

    PositionMask that were never hidden, or still are, have none.
    """
    found: dict[int, float] = {}
    before: Sequence[bool] = ()
    for time, masked in states:
        found |= {
            position: 1 - time
            for position, (was, now) in enumerate(zip(before, masked, strict=False))
            if was and not now
        }
        before = masked
    return tuple(found[position] for position, masked in enumerate(before) if position in found and not masked)


def _path(
    model: Model, task: Task, sampling: SamplingRequest, index: int, advance: Callable[[], None]
) -> list[StreamState]:
    # One by one: on a CPU that is quicker than side by side, where all wait for the longest.
    path = list(model.watch(replace(task, number=1, seed=task.seed + index), sampling))
    advance()
    return path


def _network(
    model: Model, corpus: Sequence[str], stored: Reference | None, seed: int
) -> tuple[float | None, str | None, float | None]:
    """Nats a token that the network needs, of which texts, and what frequencies alone need.

    Without a corpus, on what the network itself writes, not sharpened: an untrained one is as unsure of that as of
    anything, and the entropy of its training corpus stands for the frequencies.
    """
    if not model.config.objective.scoring_quantities(model.config.time).available:
        return None, None, None
    texts = corpus or [
        written.text
        for written in model.write(
            Task(OWN_TEXTS, min(12, model.max_length), seed=seed), SamplingRequest(config=SamplerConfig(steps=32))
        )
    ]
    rows = read(model.vocabulary, texts)
    chosen = [index for index, row in enumerate(rows) if 0 < len(row) <= model.max_length][:MOST_SCORED]
    if len(chosen) < 2:
        return None, None, None
    described = f"{len(chosen)} {'sentences of the corpus' if corpus else 'texts of its own'}, {DRAWS} draws each"
    budget = EstimationBudget(precision=None, max_draws=DRAWS, strata=2, seed=seed)  # to a few tenths of a nat
    nats = model.likelihood([texts[index] for index in chosen], budget).nats_per_token
    if stored is None or not corpus:
        return nats, described, None if stored is None else _entropy(stored.counts.numpy())
    smoothed = _shares((stored.counts + 1).numpy() * model.statistics.allowed.numpy())
    return nats, described, -float(np.log(smoothed[[token for index in chosen for token in rows[index]]]).mean())


# ---- from a case to symptoms ----------------------------------------------------------------------------------------


def measure(case: Case) -> Symptoms:
    """Looks at everything that is there."""
    rows, reference = read(case.vocabulary, case.texts), case.reference
    first = _first(rows)
    words = [" ".join(map(str, row)) for row in rows]  # tokens as words, for metrics that split at blanks
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
    """As many rows as together have that many tokens, or all."""
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
    found, wanted = (np.pad(_shares(counts), (0, size - len(counts))) for counts in (lengths, expected))
    return float(np.abs(np.cumsum(found - wanted)).sum())


def _distinct(rows: tuple[Row, ...]) -> float | None:
    words = [" ".join(map(str, row)) for row in rows if len(row) > 1]
    return distinct_n(words, 2) if words else None


def _share(tokens: list[int], wanted: Sequence[int]) -> float:
    among = set(wanted)
    return sum(token in among for token in tokens) / max(1, len(tokens))


def _num_special(case: Case) -> int:
    """Special ids among what was written, and their names in the texts."""
    names = {str(name) for name in case.vocabulary.tokenizer.all_special_tokens}
    special = case.vocabulary.special.tolist()
    masked = sum(int(special[token]) for row in case.written for token in row)
    return masked + sum(text.count(name) for text in case.texts for name in names)


def _brevity(vocabulary: Vocabulary, stored: Reference) -> float | None:
    """Zipf's law of abbreviation; None where so few tokens occur that chance could break it."""
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
    # Tokens at random, as an untrained network writes them, may be read otherwise with the right vocabulary, too.
    if written[frequent].sum() < case.stored.shares[frequent].sum() / 2:
        return None
    common = (Counter(before) & Counter(after) for before, after in zip(case.written, rows, strict=True))
    return sum(sum(counts.values()) for counts in common) / sum(map(len, case.written))


def _histogram(unmask_times: tuple[tuple[float, ...], ...]) -> tuple[float, ...] | None:
    times = [time for row in unmask_times if len(row) >= LEAST_PLACES for time in row]
    if not times:
        return None
    # A step ends a tenth: what is written at 0.1 belongs to the first.
    tenths = np.clip(np.ceil(np.array(times) * TENTHS - 1e-9), 1, TENTHS).astype(np.int64) - 1
    return tuple(_shares(np.bincount(tenths, minlength=TENTHS)).tolist())
