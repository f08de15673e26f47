"""What a likelihood is reported as: nats by sentence, and rates with intervals.

    nats per unit = Σ_i nats_i / Σ_i units_i,   perplexity = exp(nats per unit),   bits per byte = nats per byte / log 2

A rate of a corpus is a ratio of sums and not a mean of ratios: long sentences weigh more. A number never goes without
its kind, its interval and its `Protocol`. Knows nothing of how nats are estimated; see `evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from diffusionbert.likelihood.intervals import (
    Difference,
    Numbers,
    Spread,
    degrees_of_freedom,
    paired_difference,
    ratio_intervals,
    spread,
    student_quantile,
)
from diffusionbert.likelihood.protocol import Limit, Protocol
from diffusionbert.method import Likelihood
from diffusionbert.shapes import RowCounts, RowKeys, RowValues


class Unit(Enum):
    """What nats are divided by."""

    SENTENCE = "sentence"
    TOKEN = "token"
    WORD = "word"
    BYTE = "byte"


@dataclass(frozen=True)
class Rate:
    """Nats a unit, with their 95 % interval."""

    nats: float
    low: float
    high: float

    @property
    def perplexity(self) -> float:
        """exp(nats a unit)."""
        return _exp(self.nats)

    @property
    def bits(self) -> float:
        """Bits a unit."""
        return _bits(self.nats)

    def to_json(self, scale: Callable[[float], float]) -> tuple[float | None, list[float | None]]:
        """The number and its interval on a scale, as plain data; ∞ becomes null."""
        value, *ends = (scale(nats) for nats in (self.nats, self.low, self.high))
        return _finite(value), [_finite(end) for end in ends]


def rates_to_json(rates: dict[Unit, Rate]) -> dict[str, Any]:
    """The units people compare in, each with its interval under `ci95`; what was not counted is null."""
    shown: dict[str, tuple[Unit, Callable[[float], float]]] = {
        "nats_per_sentence": (Unit.SENTENCE, float),
        "nats_per_token": (Unit.TOKEN, float),
        "nats_per_word": (Unit.WORD, float),
        "perplexity_per_token": (Unit.TOKEN, _exp),
        "perplexity_per_word": (Unit.WORD, _exp),
        "bits_per_byte": (Unit.BYTE, _bits),
    }
    plain = {
        name: rates[unit].to_json(scale) if unit in rates else (None, None) for name, (unit, scale) in shown.items()
    }
    values = {name: value for name, (value, _) in plain.items()}
    return values | {"ci95": {name: interval for name, (_, interval) in plain.items()}}


@dataclass(frozen=True, eq=False)
class Scores:
    """The nats of sentences, each the mean over rounds of draws, with what the sentences are measured in."""

    kind: Likelihood
    example: RowKeys
    """Names each sentence: two systems are compared on sentences of the same names."""
    nats: RowValues
    draw_variance: RowValues
    """The variance of each sentence's nats over draws, as estimated from its rounds; 0 where nothing is drawn."""
    num_rounds: int
    tokens: RowCounts
    words: RowCounts | None = None
    bytes: RowCounts | None = None

    def __post_init__(self) -> None:
        if bool(self.nats.isnan().any()) or bool((self.nats == -math.inf).any()):
            flawed = int((self.nats.isnan() | (self.nats == -math.inf)).sum())
            raise FloatingPointError(
                f"the nats of {flawed} of {len(self.nats)} sentences are no numbers: the network's answer is NaN; "
                "look at its weights, or evaluate in float32"
            )
        num_names = len(set(self.example.tolist()))
        if num_names < len(self.example):
            raise ValueError(
                f"{len(self.example)} sentences have {num_names} names, but two of one name draw "
                "the same noise: give each row of each batch its own `example`"
            )
        for name, counts in (("token", self.tokens), ("word", self.words), ("byte", self.bytes)):
            if counts is not None and bool((counts < 1).any()):
                raise ValueError(f"sentence {int(counts.argmin())} has no {name}: leave empty sentences out")

    @classmethod
    def from_rounds(
        cls,
        kind: Likelihood,
        example: RowKeys,
        rounds: list[RowValues],
        tokens: RowCounts,
        words: RowCounts | None = None,
        bytes: RowCounts | None = None,
    ) -> Scores:
        """Takes independent, unbiased estimates of each sentence's nats, one for each round."""
        if len(rounds) < 2 and kind is not Likelihood.EXACT:
            raise ValueError(f"{len(rounds)} round of draws does not tell how far draws scatter: make at least two")
        values = torch.stack(rounds).double().cpu()
        nats = values.mean(dim=0)
        variance = values.var(dim=0) / len(rounds) if kind is not Likelihood.EXACT else torch.zeros_like(nats)
        variance = variance.masked_fill(nats.isinf(), math.inf)
        return cls(kind, example, nats, variance, len(rounds), tokens, words, bytes)

    def __len__(self) -> int:
        return len(self.nats)

    @property
    def num_infinite(self) -> int:
        """The number of sentences that are impossible to the method."""
        return int(self.nats.isinf().sum())

    @property
    def finite(self) -> Scores:
        """The other sentences, for those who want to know them by themselves; the corpus's nats are infinite."""
        return self.rows(self.nats.isfinite().nonzero()[:, 0])

    @property
    def spread(self) -> Spread:
        """The variance of nats per token, over sentences and over draws."""
        return spread(self.nats.numpy(), _numbers(self.tokens), self.draw_variance.numpy())

    @property
    def degrees_of_freedom(self) -> float:
        """How well the variance over draws is known."""
        return degrees_of_freedom(self.draw_variance.numpy(), self.num_rounds)

    def counts(self) -> dict[Unit, Numbers]:
        """The units of each sentence, as far as they were counted."""
        counted = {Unit.TOKEN: self.tokens, Unit.WORD: self.words, Unit.BYTE: self.bytes}
        known = {unit: _numbers(counts) for unit, counts in counted.items() if counts is not None}
        return {Unit.SENTENCE: _numbers(torch.ones_like(self.tokens)), **known}

    def rates(self, seed: int = 0) -> dict[Unit, Rate]:
        """Rates of the language that these sentences were drawn from: the interval covers sentences and draws.

        A percentile bootstrap is a little too narrow where sentences are fewer than some thirty.
        """
        counts = self.counts()
        intervals = ratio_intervals(self.nats.numpy(), list(counts.values()), seed)
        total = float(self.nats.sum())
        return {
            unit: Rate(total / float(counts[unit].sum()), low, high)
            for unit, (low, high) in zip(counts, intervals, strict=True)
        }

    def given_rates(self) -> dict[Unit, Rate]:
        """Rates of these very sentences, drawn from nowhere: the interval covers draws alone, by Student's t."""
        total = float(self.nats.sum())
        margin = student_quantile(self.degrees_of_freedom) * math.sqrt(float(self.draw_variance.sum()))
        low, high = (total - margin, total + margin) if math.isfinite(total) else (total, total)
        sizes = {unit: float(counts.sum()) for unit, counts in self.counts().items()}
        return {unit: Rate(total / size, low / size, high / size) for unit, size in sizes.items()}

    def rows(self, index: RowKeys) -> Scores:
        """Picks sentences."""
        words, bytes = (None if counts is None else counts[index] for counts in (self.words, self.bytes))
        return Scores(
            self.kind,
            self.example[index],
            self.nats[index],
            self.draw_variance[index],
            self.num_rounds,
            self.tokens[index],
            words,
            bytes,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Each sentence by itself, with an interval over its draws."""
        sentences = [self.rows(torch.tensor([index])) for index in range(len(self))]
        plain = [rates_to_json(sentence.given_rates()) for sentence in sentences]
        return [
            {"likelihood": self.kind.value, "nats": rates.pop("nats_per_sentence"), **rates, "num_tokens": tokens}
            for rates, tokens in zip(plain, self.tokens.tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A method's likelihood on a corpus."""

    scores: Scores
    rates: dict[Unit, Rate]
    limited_by: Limit | None
    """What kept the interval wider than asked; None if it is as narrow, or if nothing was asked."""
    protocol: Protocol

    @property
    def kind(self) -> Likelihood:
        """What kind of quantity this is; kinds never share a column."""
        return self.scores.kind

    @property
    def nats_per_token(self) -> float:
        """Σ nats / Σ tokens."""
        return self.rates[Unit.TOKEN].nats

    @property
    def perplexity_per_token(self) -> float:
        """exp(nats per token)."""
        return self.rates[Unit.TOKEN].perplexity

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval of nats per token."""
        rate = self.rates[Unit.TOKEN]
        return (rate.high - rate.low) / 2 if math.isfinite(rate.high) else math.inf

    def to_json(self) -> dict[str, Any]:
        """Gives everything but the single sentences, as plain data; ∞ becomes null and `num_infinite` tells it."""
        scores, spread = self.scores, self.scores.spread
        sizes = {f"num_{unit.value}s": int(counts.sum()) for unit, counts in scores.counts().items()}
        errors = {"sentences": spread.sentences, "draws": spread.draws, "total": spread.total}
        return {
            "likelihood": self.kind.value,
            **rates_to_json(self.rates),
            "standard_error_nats_per_token": {name: _finite(math.sqrt(variance)) for name, variance in errors.items()},
            "limited_by": None if self.limited_by is None else self.limited_by.value,
            **sizes,
            "num_infinite": scores.num_infinite,
            "protocol": self.protocol.to_json(),
        }


def paired_bootstrap(first: Scores, second: Scores, unit: Unit = Unit.TOKEN, seed: int = 0) -> Difference:
    """Tells whether one system's rate is lower than another's on the same sentences, by chance or not.

    Systems with different vocabularies are compared by `Unit.WORD` or `Unit.BYTE`.
    """
    if not torch.equal(first.example, second.example):
        raise ValueError(
            f"two systems are compared on the same sentences in the same order, given {len(first)} and {len(second)} "
            "of different names: evaluate both on the same rows"
        )
    if first.kind is not second.kind:
        raise ValueError(
            f"likelihoods of the kinds {first.kind.value!r} and {second.kind.value!r} are not comparable: compare "
            "systems of one kind"
        )
    num_infinite = first.num_infinite + second.num_infinite
    if num_infinite:
        raise ValueError(f"{num_infinite} sentences have infinite nats, so there is no difference: leave them out")
    counts = first.counts(), second.counts()
    if not all(unit in counted for counted in counts):
        raise ValueError(f"no {unit.value}s were counted: give their numbers to `estimate`, or compare by Unit.TOKEN")
    return paired_difference((first.nats.numpy(), second.nats.numpy()), (counts[0][unit], counts[1][unit]), seed)


def _numbers(counts: RowCounts) -> Numbers:
    numbers: Numbers = counts.double().numpy()
    return numbers


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bits(nats: float) -> float:
    return nats / math.log(2)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 709 else math.inf
