"""Confidence intervals of corpus-level rates, and the components of their variance (percentile bootstrap: Efron 1979,
"Bootstrap methods: another look at the jackknife").

The rate of a corpus is θ = Σ_i x_i / Σ_i n_i, where x_i are the nats of sentence i and n_i its tokens (or words, or
bytes). x_i may be an estimate, a mean over draws with variance v_i given the sentence. By the law of total variance

    Var θ  =  Var over sentences of (x_i - θ n_i)  /  (S·mean(n)²)        reduced only by more sentences
            + Σ_i v_i / (Σ_i n_i)²                                        reduced also by more draws per sentence

and a bootstrap over sentences covers both, because each x_i includes its own noise.

Pure numpy. Infinite nats are allowed and stay infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]  # one number per sentence
RESAMPLES = 2000
_CELLS = 2**20  # in a table of resampled counts: 8 MB for any number of sentences
_CACHED_CELLS = 2**23  # in a cached table: 16 MB


@dataclass(frozen=True)
class Spread:
    """The variance of a rate, split by its source."""

    sentences: float  # the variance over sentences, which remains with infinitely many draws; NaN for a single sentence
    draws: float  # the variance over draws, given these sentences

    @property
    def total(self) -> float:
        return self.sentences + self.draws


def spread(nats: Numbers, counts: Numbers, draw_variances: Numbers) -> Spread:
    """Splits the variance of Σ nats / Σ counts; `draw_variances` are s²/R for a mean of R draws, per sentence."""
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
    """(Σv)² / Σ(v²/(R-1)), the degrees of freedom of a sum of variances from R rounds each (Satterthwaite 1946)."""
    total = draw_variances.sum()
    if rounds < 2 or not np.isfinite(total) or total == 0:
        return math.inf  # exact, or not estimable: more draws would not help
    fractions = draw_variances / total
    return float((rounds - 1) / np.square(fractions).sum())


@cache
def student_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t, by integrating its density, ∝ cos(φ)^(ν-1) with t = √ν·tan φ."""
    if not degrees >= 1:
        raise ValueError(f"`degrees` of freedom must be >= 1, got {degrees}; draw at least twice")
    degrees = min(degrees, 1e6)  # from there on, it equals the normal distribution to six digits
    angles = np.linspace(0.0, min(math.pi / 2, 12 / math.sqrt(degrees)), 4001)
    mass = _student_mass(degrees, angles)
    return math.sqrt(degrees) * math.tan(float(np.interp(0.95 * mass[-1], mass, angles)))


def student_p_value(t: float, degrees: float) -> float:
    """The probability that Student's |t| is at least this large."""
    degrees = min(degrees, 1e6)
    angles = np.linspace(0.0, min(math.pi / 2, 12 / math.sqrt(degrees)), 4001)
    mass = _student_mass(degrees, angles)
    return 1 - float(np.interp(math.atan(abs(t) / math.sqrt(degrees)), angles, mass)) / float(mass[-1])


def _student_mass(degrees: float, angles: Numbers) -> Numbers:
    """The integral of the density to each angle, up to a constant factor."""
    density = np.cos(angles) ** (degrees - 1)
    return np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])


def resampled_sums(columns: list[Numbers], seed: int, resamples: int = RESAMPLES) -> list[Numbers]:
    """The sums of each column over S sentences drawn with replacement, once per resample."""
    size = len(columns[0])
    finite = np.stack([np.where(np.isfinite(column), column, 0.0) for column in columns], axis=1)
    infinite = np.stack([np.isinf(column) for column in columns], axis=1).astype(np.float64)
    table = np.concatenate([finite, infinite], axis=1)
    draw = _cached_resamples if size * resamples <= _CACHED_CELLS else _resamples
    sums = [multiplicities.astype(np.float64) @ table for multiplicities in draw(size, seed, resamples)]
    finite_sums, infinite_sums = np.split(np.concatenate(sums), 2, axis=1)
    return list(np.where(infinite_sums > 0, np.inf, finite_sums).T)


def _resamples(size: int, seed: int, resamples: int) -> Iterator[npt.NDArray[np.uint16]]:
    """The multiplicity of each sentence in each resample, in chunks of resamples."""
    rng = np.random.default_rng(seed)
    chunk_size = max(1, _CELLS // size)
    for start in range(0, resamples, chunk_size):
        num = min(chunk_size, resamples - start)
        chosen = rng.integers(size, size=(num, size)) + size * np.arange(num)[:, None]
        yield np.bincount(chosen.ravel(), minlength=num * size).reshape(num, size).astype(np.uint16)


@lru_cache(maxsize=4)
def _cached_resamples(size: int, seed: int, resamples: int) -> tuple[npt.NDArray[np.uint16], ...]:
    """The same, cached: tables compare many systems on the same sentences, and resampling takes most of the time."""
    return tuple(_resamples(size, seed, resamples))


def percentile_interval(values: Numbers) -> tuple[float, float]:
    """The central 95 %, without interpolation between values, because some may be infinite."""
    ordered = np.sort(values)
    num_outside = math.floor(0.025 * (len(ordered) - 1))
    return float(ordered[num_outside]), float(ordered[len(ordered) - 1 - num_outside])


def ratio_intervals(nats: Numbers, counts: list[Numbers], seed: int) -> list[tuple[float, float]]:
    """The 95 % interval of Σ nats / Σ counts over sentences, for the counts of each unit."""
    if len(nats) < 2:
        raise ValueError(
            f"an interval over sentences needs at least two of them, got {len(nats)}; give more, or use the interval "
            "for the given sentences alone"
        )
    total, *sizes = resampled_sums([nats, *counts], seed)
    return [percentile_interval(total / size) for size in sizes]


@dataclass(frozen=True)
class Difference:
    """The difference between two systems on the same sentences, with its 95 % interval."""

    value: float  # the rate of the first system minus that of the second; below 0, the first is better
    low: float
    high: float
    p_value: float  # two-sided, under the null hypothesis of no difference


def with_seeds(difference: Difference, *rates: Numbers) -> Difference:
    """Extends the interval of a difference between two systems, each averaged over several training seeds, to seeds.

    The interval of the given difference covers sentences and draws. The variances of the two means over seeds are added
    to it, and Student's t replaces the normal distribution (Satterthwaite 1946).

    Args:
        difference: The difference of the means over seeds.
        rates: The rates of each system, one per seed; two or more.
    """
    variances = [float(one.var(ddof=1)) / len(one) for one in rates]
    sentences = ((difference.high - difference.low) / (2 * 1.96)) ** 2
    total = sentences + sum(variances)
    if total == 0:
        return difference
    squares = sum(variance**2 / (len(one) - 1) for variance, one in zip(variances, rates, strict=True))
    degrees = total**2 / squares if squares > 0 else math.inf
    margin = student_quantile(degrees) * math.sqrt(total)
    p_value = student_p_value(difference.value / math.sqrt(total), degrees)
    return Difference(difference.value, difference.value - margin, difference.value + margin, p_value)


def paired_difference(
    nats: tuple[Numbers, Numbers], counts: tuple[Numbers, Numbers], seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """The difference of two rates on the same sentences, by a paired bootstrap.

    The p-value is twice the smaller fraction of resamples on either side of 0; one is added to the count, so that it
    is never 0.
    """
    first, second, size_first, size_second = resampled_sums([*nats, *counts], seed, resamples)
    differences = first / size_first - second / size_second
    low, high = percentile_interval(differences)
    tail = 1 + min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    value = float(nats[0].sum() / counts[0].sum() - nats[1].sum() / counts[1].sum())
    return Difference(value, low, high, min(1.0, 2 * tail / (resamples + 1)))
