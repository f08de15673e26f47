"""Efron 1979, "Bootstrap methods: another look at the jackknife": percentile intervals, and where variance comes from.

A corpus has a rate θ = Σ_i x_i / Σ_i n_i: x_i are the nats of sentence i, n_i its tokens (or words, or bytes). What
is known of x_i may itself be a mean over draws, with variance v_i given the sentence. By the law of total variance

    Var θ  =  Var over sentences of (x_i - θ n_i)  /  (S·mean(n)²)        only more sentences make it smaller
            + Σ_i v_i / (Σ_i n_i)²                                        more draws a sentence make it smaller, too

and a bootstrap over sentences covers both, because each x_i comes with its own noise of drawing.

Pure numpy: this module knows nothing of methods, networks or text. Infinite nats are allowed and stay infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
"""One number for each sentence."""
RESAMPLES = 2000
_CELLS = 2**20  # of a table of resampled counts: 8 MB, however many sentences there are
_KEPT_CELLS = 2**23  # 16 MB


@dataclass(frozen=True)
class Spread:
    """The variance of a rate, told apart by what would make it smaller."""

    sentences: float
    """What is left of it with endless draws; NaN for a single sentence, of which nothing can be said."""
    draws: float
    """What is left of it with these very sentences, were they all there are."""

    @property
    def total(self) -> float:
        """The variance of the rate as an estimate of the language's."""
        return self.sentences + self.draws


def spread(nats: Numbers, counts: Numbers, draw_variances: Numbers) -> Spread:
    """Tells the two parts of the variance of Σ nats / Σ counts apart.

    `draw_variances` holds, for each sentence, the variance of its nats over draws: s²/R for a mean of R draws.
    """
    if not np.isfinite(nats).all():
        return Spread(math.inf, math.inf)
    size = counts.sum()
    draws = float(draw_variances.sum() / size**2)
    if len(nats) < 2:
        return Spread(math.nan, draws)
    residuals = nats - nats.sum() / size * counts
    total = float(np.square(residuals).sum() / size**2) * len(nats) / (len(nats) - 1)
    return Spread(max(0.0, total - draws), draws)  # a difference of two estimates may fall below 0


def degrees_of_freedom(draw_variances: Numbers, rounds: int) -> float:
    """How well a sum of variances is known, each from so many draws (Satterthwaite 1946): (Σv)² / Σ(v²/(R-1))."""
    total = draw_variances.sum()
    if rounds < 2 or not np.isfinite(total) or total == 0:
        return math.inf  # exact, or beyond estimation: nothing is gained by drawing on
    shares = draw_variances / total
    return float((rounds - 1) / np.square(shares).sum())


@cache
def student_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t: with t = √ν·tan φ the density is ∝ cos(φ)^(ν-1), which is summed up."""
    if not degrees >= 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, given {degrees}: draw at least twice")
    degrees = min(degrees, 1e6)  # where it is the normal distribution to six digits
    angles = np.linspace(0.0, min(math.pi / 2, 12 / math.sqrt(degrees)), 4001)
    density = np.cos(angles) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(0.95 * mass[-1], mass, angles)))


def resampled_sums(columns: list[Numbers], seed: int, resamples: int = RESAMPLES) -> list[Numbers]:
    """The sums of all columns over S sentences drawn with replacement, again and again."""
    size = len(columns[0])
    finite = np.stack([np.where(np.isfinite(column), column, 0.0) for column in columns], axis=1)
    infinite = np.stack([np.isinf(column) for column in columns], axis=1).astype(np.float64)
    table = np.concatenate([finite, infinite], axis=1)
    drawn = _kept_resamples if size * resamples <= _KEPT_CELLS else _resamples
    sums = [times_chosen.astype(np.float64) @ table for times_chosen in drawn(size, seed, resamples)]
    finite_sums, infinite_sums = np.split(np.concatenate(sums), 2, axis=1)
    return list(np.where(infinite_sums > 0, np.inf, finite_sums).T)


def _resamples(size: int, seed: int, resamples: int) -> Iterator[npt.NDArray[np.uint16]]:
    """How often each sentence is chosen in each resample, some resamples at a time."""
    chance = np.random.default_rng(seed)
    at_once = max(1, _CELLS // size)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        chosen = chance.integers(size, size=(rows, size)) + size * np.arange(rows)[:, None]
        yield np.bincount(chosen.ravel(), minlength=rows * size).reshape(rows, size).astype(np.uint16)


@lru_cache(maxsize=4)
def _kept_resamples(size: int, seed: int, resamples: int) -> tuple[npt.NDArray[np.uint16], ...]:
    """The same, kept: tables compare many systems on the same sentences, and drawing takes most of the time."""
    return tuple(_resamples(size, seed, resamples))


def percentile_interval(values: Numbers) -> tuple[float, float]:
    """The middle 95 %, between two of the values themselves, since between a number and infinity nothing lies."""
    ordered = np.sort(values)
    outside = 0.025 * (len(ordered) - 1)
    return float(ordered[math.floor(outside)]), float(ordered[len(ordered) - 1 - math.floor(outside)])


def ratio_intervals(nats: Numbers, counts: list[Numbers], seed: int) -> list[tuple[float, float]]:
    """The 95 % interval of Σ nats / Σ counts for each unit that is counted, over sentences."""
    if len(nats) < 2:
        raise ValueError(
            f"an interval over sentences needs at least two of them, given {len(nats)}: give more, or ask about "
            "the given ones alone"
        )
    total, *sizes = resampled_sums([nats, *counts], seed)
    return [percentile_interval(total / size) for size in sizes]


@dataclass(frozen=True)
class Difference:
    """How far apart two systems are on the same sentences."""

    value: float
    """The first's rate less the second's: below 0, the first is better."""
    low: float
    high: float
    p_value: float
    """Two-sided: how often, were there no difference, chance would show one as large."""


def paired_difference(
    nats: tuple[Numbers, Numbers], counts: tuple[Numbers, Numbers], seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """The difference of two rates on the same sentences, which are resampled in pairs.

    p is twice the smaller share of resamples on either side of 0, one added to each so that it is never 0.
    """
    first, second, size_first, size_second = resampled_sums([*nats, *counts], seed, resamples)
    differences = first / size_first - second / size_second
    low, high = percentile_interval(differences)
    tail = 1 + min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    value = float(nats[0].sum() / counts[0].sum() - nats[1].sum() / counts[1].sum())
    return Difference(value, low, high, min(1.0, 2 * tail / (resamples + 1)))
