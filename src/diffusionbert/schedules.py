"""Noise schedules: the probability ᾱ_t(v) that a token v is still visible at time t.

Survival is 1 at t = 0, 0 at t = 1 and never rises. A schedule is a function of the time and of the token's
*relative information* h(v) / c, where h(v) = -log(relative frequency of v) and c is a mean of h; a token
whose information is the mean has relative information 1. Schedules know nothing of tokens, of sentences or
of what noise does to them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from diffusionbert.shapes import Grid, PerToken, TokenSet, Values


@dataclass(frozen=True, eq=False)
class TokenInformation:
    """h(v) = -log(relative frequency of v) in a corpus, smoothed so that 0 < h < ∞, and its mean over the corpus."""

    values: PerToken
    mean: float
    """Σ p(v) h(v), weighted by token."""

    @classmethod
    def from_counts(cls, counts: Tensor, smoothing: float = 1.0, writable: TokenSet | None = None) -> TokenInformation:
        """Adds `smoothing` to every count; tokens that are never written get the mean and so follow linear."""
        writable = torch.ones(len(counts), dtype=torch.bool) if writable is None else writable.cpu()
        if len(writable) != len(counts):
            raise ValueError(f"there must be a count for each of {len(writable)} tokens, given {len(counts)} counts")
        counts = counts.cpu()
        if not smoothing > 0 or bool((counts < 0).any()) or int(writable.sum()) < 2:
            raise ValueError(
                f"token information needs smoothing > 0 (given {smoothing}), counts >= 0 and at least two writable "
                f"tokens (given {int(writable.sum())}); count the tokens of the training corpus and keep smoothing 1"
            )
        smoothed = counts[writable].double() + smoothing
        others = smoothed.sum() - smoothed
        known = torch.log1p(others / smoothed)  # log(total / own), exact for a token that is nearly everything
        if not bool((known > 0).all()):
            raise ValueError(
                f"smoothing {smoothing} vanishes beside the largest count {int(counts.max())}, so that token would "
                "carry no information; use a larger smoothing"
            )
        mean = float((smoothed * known).sum() / smoothed.sum())
        values = torch.full((len(counts),), mean, dtype=torch.float64)
        values[writable] = known
        return cls(values, mean)


class NoiseSchedule(ABC):
    """ᾱ_t as a function of time and relative information; arguments broadcast against each other."""

    @property
    @abstractmethod
    def by_token(self) -> bool:
        """Whether two tokens may survive differently."""

    @abstractmethod
    def survival(self, t: Values, relative_information: Values) -> Values:
        """ᾱ_t(v)."""

    @abstractmethod
    def decay(self, t: Values, relative_information: Values) -> Values:
        """-dᾱ_t(v)/dt for 0 < t < 1, never negative."""


@dataclass(frozen=True)
class Linear(NoiseSchedule):
    """ᾱ_t = 1 - t: the published β_t = (T-t+1)⁻¹ (Sohl-Dickstein et al. 2015; D3PM, Austin et al. 2021)."""

    @property
    def by_token(self) -> bool:
        """No: every token alike."""
        return False

    def survival(self, t: Values, relative_information: Values) -> Values:
        """1 - t."""
        return (1 - t) + torch.zeros_like(relative_information)

    def decay(self, t: Values, relative_information: Values) -> Values:
        """1."""
        return torch.ones_like(t) + torch.zeros_like(relative_information)


@dataclass(frozen=True)
class Cosine(NoiseSchedule):
    """ᾱ_t = cos²(πt/2) (Nichol & Dhariwal 2021, eq. 17, without its offset, so that ᾱ_0 = 1)."""

    @property
    def by_token(self) -> bool:
        """No: every token alike."""
        return False

    def survival(self, t: Values, relative_information: Values) -> Values:
        """cos²(πt/2), written as 1 - sin² because only that is exactly 0 at t = 1."""
        return 1 - torch.sin(math.pi / 2 * t).square() + torch.zeros_like(relative_information)

    def decay(self, t: Values, relative_information: Values) -> Values:
        """(π/2) sin(πt)."""
        return math.pi / 2 * _sine(t) + torch.zeros_like(relative_information)


@dataclass(frozen=True)
class Sqrt(NoiseSchedule):
    """ᾱ_t = 1 - √t: much noise at once, because a vector hardly moves before its nearest word changes.

    Li et al. 2022 (Diffusion-LM), appendix A, whose offset s = 1e-4 is the Gaussian process's floor √s = 0.01.
    """

    @property
    def by_token(self) -> bool:
        """No: every token alike."""
        return False

    def survival(self, t: Values, relative_information: Values) -> Values:
        """1 - √t."""
        return (1 - t.sqrt()) + torch.zeros_like(relative_information)

    def decay(self, t: Values, relative_information: Values) -> Values:
        """1/(2√t)."""
        return 0.5 / t.sqrt() + torch.zeros_like(relative_information)


@dataclass(frozen=True)
class Power(NoiseSchedule):
    """ᾱ_t(v) = 1 - t^w(v) (Shi et al. 2024, GenMD4, §6): large w hide late and so are written first. w = 1 is `Linear`.

    Here the "relative information" of a token is its exponent w(v) itself, above 0; it may be learned.
    """

    @property
    def by_token(self) -> bool:
        """Yes: every token has its own exponent."""
        return True

    def survival(self, t: Values, relative_information: Values) -> Values:
        """1 - t^w."""
        return 1 - t**relative_information

    def decay(self, t: Values, relative_information: Values) -> Values:
        """w·t^(w-1)."""
        return relative_information * t ** (relative_information - 1)


class Mean(Enum):
    """Over what the spindle takes the mean information c."""

    SENTENCE = "sentence"
    """The sentence's own editable tokens, as in the paper; the reverse process must guess it."""
    CORPUS = "corpus"
    """All tokens of the training corpus: a constant, so that the bound is tight."""


@dataclass(frozen=True)
class Spindle(NoiseSchedule):
    """ᾱ_t(v) = clamp(1 - t - λ sin(πt) H̃(v), 0, 1), H̃(v) = 1 - c/h(v) (He et al. 2022, eq. 9-11).

    Rare words are hidden first and so written last. As printed, without the clamp, the curve leaves [0, 1]
    where λπ|H̃| > 1. The clamped curve is the running minimum of the printed one, cut to [0, 1], so it never
    rises. λ = 0 is `Linear`.
    """

    strength: float = 0.3
    """λ."""
    mean: Mean = Mean.CORPUS
    floor: float = 0.0
    """Share of `Linear` mixed in; above 0, no token ever waits for a time at which it cannot be revealed."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf or not 0 <= self.floor <= 1:
            raise ValueError(
                f"Spindle(strength={self.strength}, floor={self.floor}): strength must be finite and not negative "
                "(the paper's curves use about 0.3), floor must lie in [0, 1]"
            )

    @property
    def by_token(self) -> bool:
        """Yes: that is its point."""
        return True

    def unclamped(self, t: Values, relative_information: Values) -> Values:
        """The curve as the paper prints it."""
        return 1 - t - self.strength * _sine(t) * _informativeness(relative_information)

    def survival(self, t: Values, relative_information: Values) -> Values:
        """The printed curve cut to [0, 1], with the floor mixed in."""
        spindle = self.unclamped(t, relative_information).clamp(0, 1)
        return (1 - self.floor) * spindle + self.floor * (1 - t)

    def decay(self, t: Values, relative_information: Values) -> Values:
        """The slope of the printed curve where it lies inside (0, 1), else that of the floor alone."""
        curve = self.unclamped(t, relative_information)
        slope = 1 + self.strength * math.pi * torch.cos(math.pi * t) * _informativeness(relative_information)
        inside = (curve > 0) & (curve < 1)
        return (1 - self.floor) * torch.where(inside, slope, 0.0).clamp(min=0) + self.floor


def uniform_grid(num_steps: int, end: float = 1.0) -> Grid:
    """The times 0, 1/T, …, 1 (or up to another end), between which T steps are made."""
    if num_steps < 1:
        raise ValueError(f"there must be at least 1 step from noise to text, given {num_steps}; 128 is usual")
    if not 0 < end <= 1:
        raise ValueError(f"a grid of times must end in (0, 1], given {end}; 1 is pure noise")
    return torch.arange(num_steps + 1, dtype=torch.float64) / num_steps * end


def require_grid(grid: Grid, *, partial: bool = False) -> None:
    """Raises ValueError unless times rise from 0 to 1; a partial grid, on which a sampler goes, may end before."""
    rises = len(grid) > 1 and float(grid[0]) == 0 and bool((grid.diff() > 0).all())
    if not rises or not (float(grid[-1]) == 1 or (partial and float(grid[-1]) < 1)):
        raise ValueError(f"a grid must rise from 0 to 1, given {grid.tolist()}; see uniform_grid(num_steps)")


def _sine(t: Tensor) -> Tensor:
    """sin(πt) for t in [0, 1], exactly 0 at both ends."""
    return torch.sin(math.pi * torch.minimum(t, 1 - t))


def _informativeness(relative_information: Tensor) -> Tensor:
    """H̃ = 1 - c/h: above 0 for tokens that tell more than the mean."""
    return 1 - 1 / relative_information
