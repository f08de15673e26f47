"""Noise schedules: the survival ᾱ_t(v), the probability that a token v is still unmasked at time t.

Survival is 1 at t = 0, 0 at t = 1 and never increases. A schedule is a function of the time and of the token's
*relative information* h(v) / c, where h(v) = -log(relative frequency of v) and c is a mean of h; a token whose
information equals the mean has relative information 1. Schedules know nothing about tokens, sequences or the kind of
noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import Grid, PerToken, TokenSet, Values
from diffusionbert.registry import Registry, describe, register


@dataclass(frozen=True, eq=False)
class TokenInformation:
    """h(v) = -log(relative frequency of v) in a corpus, smoothed so that 0 < h < ∞, and its mean over the corpus."""

    values: PerToken
    mean: float  # Σ p(v) h(v), weighted by token

    @classmethod
    def from_counts(cls, counts: Tensor, smoothing: float = 1.0, allowed: TokenSet | None = None) -> TokenInformation:
        """Adds `smoothing` to every count; tokens that are not allowed get the mean, so their schedule is linear."""
        allowed = torch.ones(len(counts), dtype=torch.bool) if allowed is None else allowed.cpu()
        if len(allowed) != len(counts):
            raise ValueError(f"`counts` must have one entry for each of the {len(allowed)} tokens, got {len(counts)}")
        counts = counts.cpu()
        if not smoothing > 0 or bool((counts < 0).any()) or int(allowed.sum()) < 2:
            raise ValueError(
                f"token information needs smoothing > 0 (given {smoothing}), counts >= 0 and at least two allowed "
                f"tokens (given {int(allowed.sum())}); count the tokens of the training corpus and keep smoothing 1"
            )
        smoothed = counts[allowed].double() + smoothing
        others = smoothed.sum() - smoothed
        known = torch.log1p(others / smoothed)  # log(total / own), accurate even if one token is nearly everything
        if not bool((known > 0).all()):
            raise ValueError(
                f"smoothing {smoothing} is lost in rounding next to the largest count {int(counts.max())}, so that "
                "token would carry no information; use a larger smoothing"
            )
        mean = float((smoothed * known).sum() / smoothed.sum())
        values = torch.full((len(counts),), mean, dtype=torch.float64)
        values[allowed] = known
        return cls(values, mean)


class Mean(Enum):
    """The mean information c that a token-dependent schedule compares each token with."""

    SENTENCE = "sentence"  # the sequence's own editable tokens, as in the paper; the reverse process must guess it
    CORPUS = "corpus"  # all tokens of the training corpus: a constant, so the bound is tight


class NoiseSchedule(ABC):
    """ᾱ_t as a function of time and relative information; arguments broadcast against each other.

    To add your own, register a frozen dataclass with `survival` and `masking_density`. If survival depends on the
    token, set `by_token = True` in its body; the properties below have defaults that suit most schedules.
    """

    registry: ClassVar[Registry[NoiseSchedule]] = Registry(
        "schedule", "diffusionbert.schedules", "diffusionbert.diffusion.schedules"
    )

    @abstractmethod
    def survival(self, t: Values, relative_information: Values) -> Values:
        """ᾱ_t(v)."""

    @abstractmethod
    def masking_density(self, t: Values, relative_information: Values) -> Values:
        """-dᾱ_t(v)/dt for 0 < t < 1, never negative: the density of the time at which a token is masked."""

    by_token = False
    """Whether survival depends on the token."""
    takes_exponents = False
    """Whether a token's relative information is its own exponent, which may be learned."""

    @property
    def mean(self) -> Mean:
        """The mean that information is relative to; has no effect unless `by_token`."""
        return Mean.CORPUS

    @property
    def has_finite_divergence(self) -> bool:
        """Whether the strict bound is finite for every network that gives each allowed token some probability."""
        return True

    def __str__(self) -> str:
        return describe(self)


@register("linear")
@dataclass(frozen=True)
class Linear(NoiseSchedule):
    """ᾱ_t = 1 - t: the published β_t = (T-t+1)⁻¹ (Sohl-Dickstein et al. 2015; D3PM, Austin et al. 2021)."""

    def survival(self, t: Values, relative_information: Values) -> Values:
        return (1 - t) + torch.zeros_like(relative_information)

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        return torch.ones_like(t) + torch.zeros_like(relative_information)


@register("cosine")
@dataclass(frozen=True)
class Cosine(NoiseSchedule):
    """ᾱ_t = cos²(πt/2) (Nichol & Dhariwal 2021, eq. 17, without its offset, so that ᾱ_0 = 1)."""

    def survival(self, t: Values, relative_information: Values) -> Values:
        # cos²(πt/2) as 1 - sin², because only that is exactly 0 at t = 1.
        return 1 - torch.sin(math.pi / 2 * t).square() + torch.zeros_like(relative_information)

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        return math.pi / 2 * _sine(t) + torch.zeros_like(relative_information)


@register("sqrt")
@dataclass(frozen=True)
class Sqrt(NoiseSchedule):
    """ᾱ_t = 1 - √t: much noise early on, because a small displacement rarely changes a vector's nearest token.

    Li et al. 2022 (Diffusion-LM), appendix A; their offset s = 1e-4 is a floor of √s = 0.01 in the Gaussian process.
    """

    def survival(self, t: Values, relative_information: Values) -> Values:
        return (1 - t.sqrt()) + torch.zeros_like(relative_information)

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        return 0.5 / t.sqrt() + torch.zeros_like(relative_information)


@register("power")
@dataclass(frozen=True)
class Power(NoiseSchedule):
    """ᾱ_t(v) = 1 - t^w(v) (Shi et al. 2024, GenMD4, §6): tokens with large w are masked late, so unmasked first.

    w = 1 is `Linear`. Here the "relative information" of a token is its exponent w(v) > 0 itself; it may be learned.
    """

    by_token = True
    takes_exponents = True

    def survival(self, t: Values, relative_information: Values) -> Values:
        return 1 - t**relative_information

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        return relative_information * t ** (relative_information - 1)


@register("spindle")
@dataclass(frozen=True)
class Spindle(NoiseSchedule):
    """ᾱ_t(v) = clamp(1 - t - λ sin(πt) H̃(v), 0, 1), H̃(v) = 1 - c/h(v) (He et al. 2022, eq. 9-11).

    Rare tokens are masked first and so generated last. As printed, without the clamp, the curve leaves [0, 1]
    where λπ|H̃| > 1. The clamped curve is the running minimum of the printed one, cut to [0, 1], so it never
    increases. λ = 0 is `Linear`.
    """

    by_token = True

    strength: float = 0.3
    """λ."""
    mean: Mean = Mean.CORPUS
    floor: float = 0.0
    """Fraction of `Linear` mixed in; above 0, every masked token can be unmasked at any time."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf or not 0 <= self.floor <= 1:
            raise ValueError(
                f"a spindle needs a finite `strength` >= 0 and a `floor` in [0, 1], got strength {self.strength} and "
                f"floor {self.floor}; the paper's curves use a strength of about 0.3"
            )

    @property
    def has_finite_divergence(self) -> bool:
        """A guessed sentence mean needs a floor, else the reverse process may give the true step probability 0."""
        return self.mean is Mean.CORPUS or self.floor > 0

    def __str__(self) -> str:
        floor = f", floor {self.floor:g}" if self.floor else ""
        return f"spindle (λ = {self.strength:g}, {self.mean.value} mean{floor})"

    def unclamped(self, t: Values, relative_information: Values) -> Values:
        """The curve as the paper prints it."""
        return 1 - t - self.strength * _sine(t) * _informativeness(relative_information)

    def survival(self, t: Values, relative_information: Values) -> Values:
        spindle = self.unclamped(t, relative_information).clamp(0, 1)
        return (1 - self.floor) * spindle + self.floor * (1 - t)

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        """The slope of the printed curve where it lies inside (0, 1), else that of the floor alone."""
        curve = self.unclamped(t, relative_information)
        slope = 1 + self.strength * math.pi * torch.cos(math.pi * t) * _informativeness(relative_information)
        inside = (curve > 0) & (curve < 1)
        return (1 - self.floor) * torch.where(inside, slope, 0.0).clamp(min=0) + self.floor


def uniform_grid(num_steps: int, end: float = 1.0) -> Grid:
    """The T + 1 times 0, 1/T, …, 1, scaled to `end`."""
    if num_steps < 1:
        raise ValueError(f"`num_steps` must be at least 1, got {num_steps}; 128 is usual")
    if not 0 < end <= 1:
        raise ValueError(f"a time grid must end in (0, 1], got {end}; 1 is pure noise")
    return torch.arange(num_steps + 1, dtype=torch.float64) / num_steps * end


def require_grid(grid: Grid, *, partial: bool = False) -> None:
    """Raises ValueError unless times rise from 0 to 1; a partial grid, as samplers may use, can end earlier."""
    rises = len(grid) > 1 and float(grid[0]) == 0 and bool((grid.diff() > 0).all())
    if not rises or not (float(grid[-1]) == 1 or (partial and float(grid[-1]) < 1)):
        raise ValueError(f"a time grid must rise from 0 to 1, got {grid.tolist()}; see uniform_grid(num_steps)")


def _sine(t: Tensor) -> Tensor:
    """sin(πt) for t in [0, 1], exactly 0 at both ends."""
    return torch.sin(math.pi * torch.minimum(t, 1 - t))


def _informativeness(relative_information: Tensor) -> Tensor:
    """H̃ = 1 - c/h: positive for tokens more informative than the mean."""
    return 1 - 1 / relative_information
