"""What is wrong with generated text, why, and what mends it.

`examine` gathers a `Case`: what a model writes and when, or samples from a file, and what the text they should resemble
is like. `measure` turns a case into `Figures`, `diagnose` figures into `Finding`s, each with a stable code. So whatever
has samples, reveal times or counts can be diagnosed, also what this package did not write.

Thresholds lie between what is healthy and what was broken on purpose, both measured on the bundled model: 64 samples
of 1,800 tokens in all, top-k 30, against its training corpus; real sentences of other corpora; temperature 0.3 and 2,
top-k 1, confidence order, 4 steps, random weights, permuted ids. The two ends stand beside each threshold. Knows samplers
by their settings alone, and no concrete method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.evaluation import Effort
from diffusionbert.metrics import distinct_n, repetition
from diffusionbert.model import Model, Moment, Task
from diffusionbert.sampling import Algorithm, Sampling
from diffusionbert.vocabulary import Vocabulary

Row = tuple[int, ...]
"""A sentence's own tokens."""
TENTHS = 10
TOP = 100
"""So many of the most frequent tokens are looked at: few samples suffice to know their shares."""
MOST_TOKENS = 2000
"""Entropies and distinct n-grams depend on the size of a text, so no more is compared."""
LEAST_TOKENS, LEAST_SAMPLES = 120, 8
"""From fewer, frequencies and lengths say nothing."""
LEAST_PLACES = 8
"""Samples with fewer places are left out of the reveal times: samplers that skip say 0 for the end of each."""


class Severity(IntEnum):
    """How bad it is."""

    BROKEN = 0
    """What comes out is not this model's text; mend it before looking at anything else."""
    POOR = 1
    """Text, but worse than the model can do."""
    NOTE = 2
    """Worth knowing."""


@final
@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    evidence: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        return asdict(self) | {"severity": self.severity.name.lower()}


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

        ½ Σ |difference of shares| over the frequent tokens and the rest as one, over the most that it can be.
        """
        own = self.shares[self.frequent]
        other = _shares(_counts(rows, len(self.shares)))[self.frequent]
        return float(np.abs(own - other).sum() + abs(own.sum() - other.sum())) / 2 / float(max(own.sum(), 1 - own.sum()))

    def entropy(self, num_tokens: int) -> float:
        """The expected entropy, in nats, of so many of its tokens: few show less than all."""
        chance = np.random.default_rng(0)
        return float(np.mean([_entropy(chance.multinomial(num_tokens, self.shares)) for _ in range(4)]))


@final
@dataclass(frozen=True, eq=False)
class Case:
    """What there is to look at; only the samples must be there."""

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
    reveals: tuple[tuple[float, ...], ...] = ()
    """For each sample, how far on its way, from 0 to 1, each place was written for good; see `reveal_times`."""
    expected_late: float = 1 / TENTHS
    """The share of places that the schedule writes in the last tenth of the way."""
    sampling: Sampling | None = None
    """How the samples were made, if that is known."""
    length_asked: bool = False
    """Whether someone wanted the samples to have the lengths they have."""
    network_nats: float | None = None
    """What the network needs for a token of the corpus, or of what it writes itself."""
    unigram_nats: float | None = None
    """What frequencies alone need for the same."""


@final
@dataclass(frozen=True)
class Figures:
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
    unigram_nats: float | None
    corpus_distance: float | None
    """How other the frequencies of the corpus are than the stored ones; see `Reference.distance`."""
    brevity: float | None
    """The mean characters of tokens that occur, weighted by frequency over unweighted: frequent ones are short."""
    round_trip: float | None
    """Written tokens that are still there when the text is read again."""
    reveal_histogram: tuple[float, ...] | None
    """The share of places written in each tenth of the way."""


@final
@dataclass(frozen=True)
class Diagnosis:
    """All that was found, the most serious first, and the figures it rests on."""

    findings: tuple[Finding, ...]
    figures: Figures

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        findings = [finding.to_json() for finding in self.findings]
        return {"healthy": not findings, "findings": findings, "figures": asdict(self.figures)}


# ---- from a model to a case -----------------------------------------------------------------------------------------


def examine(
    model: Model,
    task: Task,
    sampling: Sampling,
    samples: Sequence[str] = (),
    corpus: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> Case:
    """Takes samples, or lets the model write as many as the task says; `advance` is told of each."""
    vocabulary, size = model.vocabulary, len(model.lexicon.counts)
    paths = [] if samples else [_path(model, task, sampling, index, advance) for index in range(task.number)]
    stored = Reference(model.lexicon.counts, model.length_histogram) if bool(model.lexicon.counts.any()) else None
    rows = read(vocabulary, corpus)
    schedule = getattr(model.experiment.objective, "schedule", None)
    time = torch.tensor([1 / TENTHS], dtype=torch.float64)
    network_nats, unigram_nats = _network(model, corpus, stored, task.seed)
    return Case(
        vocabulary,
        tuple(samples) or tuple(path[-1].text for path in paths),
        Reference.of_rows(rows, size) if rows else stored,
        stored,
        rows,
        tuple(_ids(vocabulary, path[-1]) for path in paths),
        tuple(reveal_times((moment.time, [piece is None for piece in moment.pieces]) for moment in path) for path in paths),
        1 / TENTHS if schedule is None else 1 - float(schedule.survival(time, torch.ones_like(time))),
        None if samples else sampling,
        not samples and task.length is not None,
        network_nats,
        unigram_nats,
    )


def read(vocabulary: Vocabulary, texts: Sequence[str]) -> tuple[Row, ...]:
    """The own tokens of each text."""
    special = vocabulary.special.tolist()
    return tuple(tuple(token for token in row if not special[token]) for row in vocabulary.encode(texts))


def reveal_times(states: Iterable[tuple[float, Sequence[bool]]]) -> tuple[float, ...]:
    """How far on its way each place was written for good, from a time (1 to 0) and which places are hidden, by state.

    Places that were never hidden, or still are, have none.
    """
    found: dict[int, float] = {}
    before: Sequence[bool] = ()
    for time, hidden in states:
        found |= {place: 1 - time for place, (was, now) in enumerate(zip(before, hidden, strict=False)) if was and not now}
        before = hidden
    return tuple(found[place] for place, hidden in enumerate(before) if place in found and not hidden)


def _path(model: Model, task: Task, sampling: Sampling, index: int, advance: Callable[[], None]) -> list[Moment]:
    # One by one: on a CPU that is quicker than side by side, where all wait for the longest.
    path = list(model.watch(replace(task, number=1, seed=task.seed + index), sampling))
    advance()
    return path


def _ids(vocabulary: Vocabulary, moment: Moment) -> Row:
    mask = str(vocabulary.tokenizer.mask_token)
    ids: Any = vocabulary.tokenizer.convert_tokens_to_ids([mask if piece is None else piece for piece in moment.pieces])
    return tuple(ids)


def _network(
    model: Model, corpus: Sequence[str], stored: Reference | None, seed: int
) -> tuple[float | None, float | None]:
    """Nats a token that the network needs, and that frequencies alone need.

    Without a corpus, on what the network itself writes, not sharpened: an untrained one is as unsure of that as of
    anything, and the entropy of its training corpus stands for the frequencies.
    """
    if not corpus:
        length = min(16, model.max_length)
        corpus = [written.text for written in model.write(Task(12, length, seed=seed), Sampling(steps=32))]
        unigram = None if stored is None else _entropy(stored.counts.numpy())
    elif stored is None:
        unigram = None
    else:
        smoothed = _shares((stored.counts + 1).numpy() * model.lexicon.writable.numpy())
        unigram = -float(np.log(smoothed[[token for row in read(model.vocabulary, corpus) for token in row]]).mean())
    fitting = [
        text
        for text, row in zip(corpus, read(model.vocabulary, corpus), strict=True)
        if 0 < len(row) <= model.max_length
    ][:64]
    if len(fitting) < 2:
        return None, unigram
    return model.likelihood(fitting, Effort(precision=None, max_draws=8, strata=4, seed=seed)).nats_per_token, unigram
