"""How a likelihood is reported: the nats of each sentence, and rates with intervals.

    nats per unit = Σ_i nats_i / Σ_i units_i,   perplexity = exp(nats per unit),   bits per byte = nats per byte / log 2

The rate of a corpus is a ratio of sums, not a mean of ratios: long sentences weigh more. Every number comes with its
kind, its interval and its `Protocol`. This module does not know how nats are estimated; see `estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from diffusionbert import __version__
from diffusionbert.diffusion.shapes import Counts, Keys, PerSequence
from diffusionbert.likelihood.intervals import (
    RESAMPLES,
    Difference,
    Numbers,
    Spread,
    degrees_of_freedom,
    paired_difference,
    ratio_intervals,
    spread,
    student_quantile,
)
from diffusionbert.objectives.base import Likelihood, LikelihoodDefinition


class Unit(Enum):
    """What nats are divided by."""

    SENTENCE = "sentence"
    TOKEN = "token"
    WORD = "word"
    BYTE = "byte"


@dataclass(frozen=True)
class PointEstimate:
    """A number with its 95 % interval."""

    value: float
    ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class Rate:
    """Nats per unit, with their 95 % interval."""

    nats: float
    low: float
    high: float

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nats)

    @property
    def bits(self) -> float:
        return bits_of(self.nats)

    def estimate(self, scale: Callable[[float], float] = float) -> PointEstimate:
        """Nats per unit with their interval, converted by `scale`."""
        return PointEstimate(scale(self.nats), (scale(self.low), scale(self.high)))


@dataclass(frozen=True)
class LikelihoodRates:
    """A likelihood in the units that people compare; None for units that were not counted."""

    nats_per_sentence: PointEstimate
    nats_per_token: PointEstimate
    perplexity_per_token: PointEstimate
    nats_per_word: PointEstimate | None = None
    perplexity_per_word: PointEstimate | None = None
    bits_per_byte: PointEstimate | None = None

    @classmethod
    def of(cls, rates: dict[Unit, Rate]) -> LikelihoodRates:
        """Converts rates per unit."""
        token, word, byte = rates[Unit.TOKEN], rates.get(Unit.WORD), rates.get(Unit.BYTE)
        return cls(
            rates[Unit.SENTENCE].estimate(),
            token.estimate(),
            token.estimate(perplexity_of),
            None if word is None else word.estimate(),
            None if word is None else word.estimate(perplexity_of),
            None if byte is None else byte.estimate(bits_of),
        )


@dataclass(frozen=True)
class StandardError:
    """Standard errors of nats per token; None if a single sentence cannot tell."""

    sentences: float | None
    draws: float | None
    total: float | None


@dataclass(frozen=True)
class LikelihoodSummary:
    """A likelihood on an evaluation set, without the scores of individual sentences."""

    kind: Likelihood
    rates: LikelihoodRates
    protocol: Protocol
    standard_error: StandardError
    limited_by: Limit | None
    """What kept the interval wider than requested; None if nothing did, or no precision was requested."""
    num_sentences: int
    num_tokens: int
    num_words: int | None
    num_bytes: int | None
    num_infinite: int
    """The number of sentences with probability 0."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The nats of sentences, each the mean over rounds of draws, and the sizes of the sentences."""

    kind: Likelihood
    example: Keys
    """Identifies each sentence: two systems are compared on sentences with the same keys."""
    nats: PerSequence
    draw_variance: PerSequence
    """The variance of each sentence's nats over draws, estimated from its rounds; 0 where nothing is drawn."""
    num_rounds: int
    tokens: Counts
    words: Counts | None = None
    bytes: Counts | None = None

    def __post_init__(self) -> None:
        if bool(self.nats.isnan().any()) or bool((self.nats == -math.inf).any()):
            flawed = int((self.nats.isnan() | (self.nats == -math.inf)).sum())
            raise FloatingPointError(
                f"the nats of {flawed} of {len(self.nats)} sentences are not numbers: the network returns NaN; "
                "check its weights, or evaluate in float32"
            )
        num_names = len(set(self.example.tolist()))
        if num_names < len(self.example):
            raise ValueError(
                f"{len(self.example)} sentences have {num_names} different `example` values, but equal ones draw the "
                "same noise: give each sequence its own"
            )
        for name, counts in (("token", self.tokens), ("word", self.words), ("byte", self.bytes)):
            if counts is not None and bool((counts < 1).any()):
                raise ValueError(f"sentence {int(counts.argmin())} has no {name}: leave empty sentences out")

    @classmethod
    def from_rounds(
        cls,
        kind: Likelihood,
        example: Keys,
        rounds: list[PerSequence],
        tokens: Counts,
        words: Counts | None = None,
        bytes: Counts | None = None,
    ) -> Scores:
        """Averages independent, unbiased estimates of each sentence's nats, one per round."""
        if len(rounds) < 2 and kind is not Likelihood.EXACT:
            raise ValueError(f"{len(rounds)} round of draws gives no variance: at least two are needed")
        values = torch.stack(rounds).double().cpu()
        nats = values.mean(dim=0)
        variance = values.var(dim=0) / len(rounds) if kind is not Likelihood.EXACT else torch.zeros_like(nats)
        variance = variance.masked_fill(nats.isinf(), math.inf)
        return cls(kind, example, nats, variance, len(rounds), tokens, words, bytes)

    def __len__(self) -> int:
        return len(self.nats)

    @property
    def num_infinite(self) -> int:
        """The number of sentences with probability 0."""
        return int(self.nats.isinf().sum())

    @property
    def finite(self) -> Scores:
        """The sentences with finite nats."""
        return self.select(self.nats.isfinite().nonzero()[:, 0])

    @property
    def spread(self) -> Spread:
        """The variance of nats per token, over sentences and over draws."""
        return spread(self.nats.numpy(), _numbers(self.tokens), self.draw_variance.numpy())

    @property
    def degrees_of_freedom(self) -> float:
        """The degrees of freedom of the variance over draws."""
        return degrees_of_freedom(self.draw_variance.numpy(), self.num_rounds)

    def counts(self) -> dict[Unit, Numbers]:
        """The number of units in each sentence, for the units that were counted."""
        counted = {Unit.TOKEN: self.tokens, Unit.WORD: self.words, Unit.BYTE: self.bytes}
        known = {unit: _numbers(counts) for unit, counts in counted.items() if counts is not None}
        return {Unit.SENTENCE: _numbers(torch.ones_like(self.tokens)), **known}

    def rates(self, seed: int = 0) -> dict[Unit, Rate]:
        """Rates of the language that the sentences are a sample of: the interval covers sentences and draws.

        A percentile bootstrap is slightly too narrow for fewer than about thirty sentences.
        """
        counts = self.counts()
        intervals = ratio_intervals(self.nats.numpy(), list(counts.values()), seed)
        total = float(self.nats.sum())
        return {
            unit: Rate(total / float(counts[unit].sum()), low, high)
            for unit, (low, high) in zip(counts, intervals, strict=True)
        }

    def nats_per(self, unit: Unit) -> float:
        """Nats per unit, without an interval."""
        return float(self.nats.sum()) / float(self.counts()[unit].sum())

    def given_rates(self) -> dict[Unit, Rate]:
        """Rates of the given sentences: the interval covers draws only, by Student's t."""
        total = float(self.nats.sum())
        margin = student_quantile(self.degrees_of_freedom) * math.sqrt(float(self.draw_variance.sum()))
        low, high = (total - margin, total + margin) if math.isfinite(total) else (total, total)
        sizes = {unit: float(counts.sum()) for unit, counts in self.counts().items()}
        return {unit: Rate(total / size, low / size, high / size) for unit, size in sizes.items()}

    def select(self, index: Keys) -> Scores:
        """Selects sentences by index."""
        words, bytes = (None if counts is None else counts[index] for counts in (self.words, self.bytes))
        nats, variance = self.nats[index], self.draw_variance[index]
        return Scores(self.kind, self.example[index], nats, variance, self.num_rounds, self.tokens[index], words, bytes)


@dataclass(frozen=True, eq=False)
class Estimate:
    """A likelihood on a corpus, with the scores of all sentences."""

    scores: Scores
    rates: dict[Unit, Rate]
    limited_by: Limit | None
    """What kept the interval wider than requested; None if nothing did, or no precision was requested."""
    protocol: Protocol

    @property
    def kind(self) -> Likelihood:
        """Exact, bound or pseudo; kinds never share a column."""
        return self.scores.kind

    @property
    def nats_per_token(self) -> float:
        """Σ nats / Σ tokens."""
        return self.rates[Unit.TOKEN].nats

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval of nats per token."""
        rate = self.rates[Unit.TOKEN]
        return (rate.high - rate.low) / 2 if math.isfinite(rate.high) else math.inf

    def summary(self) -> LikelihoodSummary:
        """Everything but the scores of individual sentences."""
        scores, spread = self.scores, self.scores.spread
        sizes = {unit: int(counts.sum()) for unit, counts in scores.counts().items()}
        return LikelihoodSummary(
            self.kind,
            LikelihoodRates.of(self.rates),
            self.protocol,
            StandardError(*(_root(variance) for variance in (spread.sentences, spread.draws, spread.total))),
            self.limited_by,
            len(scores),
            sizes[Unit.TOKEN],
            sizes.get(Unit.WORD),
            sizes.get(Unit.BYTE),
            scores.num_infinite,
        )


def paired_bootstrap(first: Scores, second: Scores, unit: Unit = Unit.TOKEN, seed: int = 0) -> Difference:
    """The difference between the rates of two systems on the same sentences (first minus second), with its p-value.

    To compare systems with different vocabularies, use `Unit.WORD` or `Unit.BYTE`.
    """
    if not torch.equal(first.example, second.example):
        raise ValueError(
            f"paired comparison needs the same sentences in the same order, got {len(first)} and {len(second)} "
            "different ones: evaluate both systems on the same sentences"
        )
    if first.kind is not second.kind:
        raise ValueError(
            f"likelihoods of the kinds {first.kind.value!r} and {second.kind.value!r} are not comparable: compare "
            "systems of one kind"
        )
    num_infinite = first.num_infinite + second.num_infinite
    if num_infinite:
        raise ValueError(f"{num_infinite} sentences have infinite nats, so the difference is undefined: leave them out")
    counts = first.counts(), second.counts()
    if not all(unit in counted for counted in counts):
        raise ValueError(f"no {unit.value}s were counted: pass their numbers to `estimate`, or compare by Unit.TOKEN")
    return paired_difference((first.nats.numpy(), second.nats.numpy()), (counts[0][unit], counts[1][unit]), seed)


def _numbers(counts: Counts) -> Numbers:
    numbers: Numbers = counts.double().numpy()
    return numbers


def _root(variance: float) -> float | None:
    return None if math.isnan(variance) else math.sqrt(variance)


def bits_of(nats: float) -> float:
    """Nats in bits."""
    return nats / math.log(2)


def perplexity_of(nats: float) -> float:
    """exp(nats), infinite where that overflows."""
    return math.exp(nats) if nats < 709 else math.inf


# ---- protocol -------------------------------------------------------------------------------------------------------
#
# The protocol of a likelihood: which number it is and how it was estimated. Numbers are comparable if these agree.


class Length(Enum):
    """Whether the nats of a sentence include -log p(length)."""

    GIVEN = "given"
    MODELED = "modelled"  # spelled as in files on disk


class Interval(Enum):
    """What a 95 % interval covers."""

    SENTENCES_AND_DRAWS = "sentences and draws"
    """The sentences are a sample of a language."""
    DRAWS = "draws"
    """The sentences are given."""

    def __str__(self) -> str:
        if self is Interval.DRAWS:
            return "95 % interval over draws, the sentences being given: Student's t"
        return f"95 % interval over sentences and draws: percentile bootstrap of {RESAMPLES} resamples"


class Limit(Enum):
    """Why the requested precision was not reached."""

    SENTENCES = "sentences"
    """Draws contribute less than a tenth of the variance; only more sentences narrow the interval."""
    DRAWS = "draws"
    """The maximum number of draws was used; more would narrow the interval."""
    INFINITE = "infinite"
    """Some sentence has probability 0 under the model."""


@dataclass(frozen=True)
class Protocol:
    """What must be known about a likelihood to compare it with another.

    The caller of `estimate` provides the fields up to `packed`; `estimate` fills in the rest.
    """

    definition: LikelihoodDefinition = LikelihoodDefinition()
    data: str | None = None
    """SHA-256 of the sentences."""
    weights: str | None = None
    """SHA-256 of the weights."""
    source_given: bool = False
    """Whether the likelihood is conditional on a source sentence."""
    special_tokens: bool = False
    """Whether `[CLS]`, `[SEP]` and padding are counted as tokens."""
    packed: bool = False
    """Whether sequences are pieces of running text rather than single sentences."""

    length: Length = Length.GIVEN
    interval: Interval | None = None
    num_draws: int = 0
    """Draws per sentence."""
    strata: int = 1
    """The number of time intervals, each with the same number of draws."""
    seed: int = 0
    precision: float | None = None
    """The requested half-width of the interval, relative to the perplexity per token."""
    arithmetic: str = "float32"
    version: str = __version__
    """The version of this package."""
