"""How a claim is judged: in every seed by itself, by bootstrap, and a difference is real only if no seed disagrees.

    holds                                  the 95 % interval lies on the claimed side in every seed
    does not hold                          it lies on the other side in every seed; or, where the paper calls the
                                           difference large, it rules out, in every seed, even half of it
    holds only by the paper's quantity     the strict bound does not show it, but what the paper calls perplexity does
    holds by the bound                     a bound lies above an exact value: it may be the bound that is loose
    undecided                              otherwise: seeds that disagree decide nothing
    undecided: too little training         a system's bound is above what word frequencies alone need
    not run yet                            a row is missing

Knows scores and samples; what is claimed is in claims.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import final

import numpy as np
import torch
from torch import Tensor

from diffusionbert.assessment.report import EvaluationResult
from diffusionbert.likelihood.evaluation import length_nats
from diffusionbert.likelihood.intervals import Numbers, paired_difference, percentile_interval, resampled_sums
from diffusionbert.likelihood.scores import Scores
from diffusionbert.metrics import PerSample


class Verdict(Enum):
    """What follows."""

    HOLDS = "holds"
    FAILS = "does not hold"
    BY_PAPER = "holds only by the paper's quantity"
    BY_BOUND = "holds by the bound"
    UNDECIDED = "undecided"
    UNLEARNT = "undecided: too little training"
    NOT_RUN = "not run yet"


@final
@dataclass(frozen=True)
class Finding:
    """What was measured, and what follows."""

    measured: tuple[str, ...]
    verdict: Verdict
    seeds: int = 0
    """How many it rests on."""


@final
@dataclass(frozen=True)
class Interval:
    """A value of one seed with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """As differences of BLEU are written."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]".replace("-", "−")

    @property
    def per_cent(self) -> str:
        """A difference of nats, as a change of perplexity."""
        if abs(self.value) > _EXTREME:
            return change(self.value)
        ends = [change(end).removesuffix(" %") for end in (self.low, self.high)]
        return f"{change(self.value)} [{ends[0]}, {ends[1]}]"


_EXTREME = math.log(1000)


def change(nats: float) -> str:
    """A difference of nats, as per cent of the second's perplexity."""
    if abs(nats) > _EXTREME:
        return "less than a thousandth" if nats < 0 else "more than a thousandfold"
    return per_cent(math.expm1(nats), 1)


def per_cent(share: float, digits: int = 0) -> str:
    """A share with its sign."""
    rounded = round(100 * share, digits)
    return f"{rounded:+.{digits}f} %".replace("-", "−") if rounded else f"±{0:.{digits}f} %"


# ---- verdicts -------------------------------------------------------------------------------------------------------


def below(found: Sequence[Interval], threshold: float = 0.0, paper: float | None = None) -> Verdict:
    """Whether a value is below a threshold in every seed; `paper` is a value below 0 that was claimed to be large."""
    if all(one.high < threshold for one in found):
        return Verdict.HOLDS
    if all(one.low > threshold for one in found):
        return Verdict.FAILS
    rules_out = paper is not None and all(one.low > paper / 2 for one in found)
    return Verdict.FAILS if rules_out else Verdict.UNDECIDED


def above(found: Sequence[Interval]) -> Verdict:
    """Whether a value is above 0 in every seed."""
    return below([Interval(-one.value, -one.high, -one.low) for one in found])


def reaching(found: Sequence[Interval], claimed: float) -> Verdict:
    """Whether a difference is as far below 0 as is claimed, as far as the interval of each seed can tell."""
    if not any(one.low <= claimed for one in found):
        return Verdict.FAILS
    is_real = all(one.low <= claimed and one.high < 0 for one in found)
    return Verdict.HOLDS if is_real else Verdict.UNDECIDED


def within(found: Sequence[Interval], low: float, high: float) -> Verdict:
    """Whether a value lies between two others in every seed."""
    if all(low <= one.low and one.high <= high for one in found):
        return Verdict.HOLDS
    return Verdict.FAILS if all(one.high < low or one.low > high for one in found) else Verdict.UNDECIDED


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim with several parts, all of which must hold."""
    for decisive in (Verdict.FAILS, Verdict.NOT_RUN):
        if decisive in verdicts:
            return decisive
    return Verdict.HOLDS if set(verdicts) == {Verdict.HOLDS} else Verdict.UNDECIDED


def either(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim that may hold in several ways."""
    if Verdict.HOLDS in verdicts:
        return Verdict.HOLDS
    return Verdict.FAILS if set(verdicts) == {Verdict.FAILS} else Verdict.UNDECIDED


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """Of one claim in several seeds."""
    return verdicts[0] if len(set(verdicts)) == 1 else Verdict.UNDECIDED


# ---- differences ----------------------------------------------------------------------------------------------------


def difference(first: Scores, second: Scores) -> Interval:
    """Nats a token, the first's less the second's, sentences resampled in pairs, whatever the kinds."""
    if first.example.tolist() != second.example.tolist():
        raise ValueError(f"{len(first)} and {len(second)} sentences of different names are no pairs: score the same")
    nats = first.nats.numpy(), second.nats.numpy()
    found = paired_difference(nats, (first.tokens.double().numpy(), second.tokens.double().numpy()))
    return Interval(found.value, found.low, found.high)


MAX_LENGTH = 128
"""Tokens that a sentence may have."""


@final
@dataclass(frozen=True)
class AgainstExact:
    """A bound beside an exact value: as they are, and with the length of each sentence paid for by the bound.

    Masked systems are told how long a sentence is; a decoder is not, and does not pay for its end.
    """

    given: Interval
    charged: Interval

    @property
    def proves(self) -> bool:
        """Whether sentences with their lengths are likelier than the decoder finds their words alone."""
        return self.charged.high < 0


def against_exact(bound: Scores, exact: Scores) -> AgainstExact:
    """Nats a token, the bound's less the exact ones."""
    charged = replace(bound, nats=bound.nats + length_costs(bound.tokens))
    return AgainstExact(difference(bound, exact), difference(charged, exact))


def length_costs(tokens: Tensor) -> Tensor:
    """What it costs to say how long each sentence is, by the lengths of all the others."""
    counts = torch.bincount(tokens, minlength=MAX_LENGTH + 1)
    costs = torch.zeros(len(counts), dtype=torch.float64)
    for length in tokens.unique():
        others = counts.clone()
        others[length] -= 1
        costs[length] = length_nats(others, length[None])
    return costs[tokens]


def means_apart(first: PerSample, second: PerSample) -> Interval:
    """Of two sets of samples, which are no pairs."""
    means = [_resampled_means(one, seed) for seed, one in enumerate((first, second))]
    return Interval(first.mean - second.mean, *percentile_interval(means[0] - means[1]))


def _resampled_means(samples: PerSample, seed: int) -> Numbers:
    means: Numbers = resampled_sums([samples.values], seed)[0] / len(samples.values)
    return means


@final
@dataclass(frozen=True)
class Gap:
    """How much higher one BLEU-4 is than another at the same self-BLEU, as a share."""

    mean: Interval
    diverse: float
    """In the third with the least self-BLEU."""
    dull: float
    """In that with the most."""

    def __str__(self) -> str:
        """The mean, and the ends."""
        interval = f"[{per_cent(self.mean.low)}, {per_cent(self.mean.high)}]".replace(" %", "")
        return (
            f"{per_cent(self.mean.value)} {interval} on average, {per_cent(self.diverse)} where texts are most "
            f"diverse, {per_cent(self.dull)} where they are least"
        )


def tradeoffs_apart(first: Sequence[EvaluationResult], second: Sequence[EvaluationResult]) -> Gap | None:
    """How much higher the first's BLEU-4 is at the same self-BLEU, as a share of the second's.

    Lines through the settings of each, over the self-BLEU that both have; None if they have none in common.
    """
    lines = [_line(evaluations, 100 * at) for at, evaluations in enumerate((first, second))]
    gaps = [_gaps(*(line[:, :, sample] for line in lines)) for sample in range(lines[0].shape[2])]
    means = [None if gap is None else float(gap.mean()) for gap in gaps]
    known = np.array([gap for gap in means[1:] if gap is not None])
    if gaps[0] is None or means[0] is None or len(known) < len(means) / 2:
        return None
    third = len(gaps[0]) // 3
    ends = float(gaps[0][:third].mean()), float(gaps[0][-third:].mean())
    return Gap(Interval(means[0], *percentile_interval(known)), *ends)


def _line(evaluations: Sequence[EvaluationResult], seed: int, resamples: int = 500) -> Numbers:
    """Self-BLEU and BLEU at each setting: the means, then resampled ones."""
    columns = []
    for place, one in enumerate(evaluations):
        pair = []
        for which, samples in enumerate((one.self_bleu4, one.bleu4)):
            drawn = _resampled_means(samples, seed + 2 * place + which)[:resamples]
            pair.append(np.concatenate([[samples.mean], drawn]))
        columns.append(pair)
    line: Numbers = np.array(columns).transpose(1, 0, 2)
    return line


def _gaps(first: Numbers, second: Numbers) -> Numbers | None:
    """How far the first line is above the second, as a share of its height, from the least self-BLEU to the most."""
    ordered = [line[:, np.argsort(line[0])] for line in (first, second)]
    low, high = max(line[0, 0] for line in ordered), min(line[0, -1] for line in ordered)
    if low >= high:
        return None
    at = np.linspace(low, high, 21)
    heights = [np.interp(at, *line) for line in ordered]
    gaps: Numbers = (heights[0] - heights[1]) / heights[1]
    return gaps
