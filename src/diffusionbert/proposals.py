"""From where times are drawn: evenly, more often from the middle of the process, or more often early.

A proposal turns evenly drawn positions in (0, 1) into times and the weights that keep the loss unbiased. Slices
of (0, 1) stay slices, so stratified draws stay stratified. Which one training uses is a setting; an estimate of nats
uses the one that suits its integrand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from diffusionbert.shapes import RowTimes, RowValues


class TimeProposal(ABC):
    """A density on (0, 1) with an invertible distribution function."""

    @abstractmethod
    def times(self, position: RowTimes) -> tuple[RowTimes, RowValues]:
        """The times at which the distribution function takes these values, and the loss's weights there."""


@dataclass(frozen=True)
class Even(TimeProposal):
    """Every time alike."""

    def times(self, position: RowTimes) -> tuple[RowTimes, RowValues]:
        """The positions themselves."""
        return position, torch.ones_like(position)


@dataclass(frozen=True)
class Early(TimeProposal):
    """Half evenly, half by the density 1/(2√t): for what grows like 1/t towards t = 0.

    In continuous time a token is hidden with probability t and then counts 1/t: drawn evenly, its square has no mean,
    and intervals from a few draws are too narrow. So drawn it has. The even half keeps weights below 4/3, so that what
    does not grow is drawn hardly worse than evenly.
    """

    def times(self, position: RowTimes) -> tuple[RowTimes, RowValues]:
        """Inverts t/2 + √t/2, a quadratic in √t."""
        root = ((1 + 8 * position).sqrt() - 1) / 2
        return root.square(), 4 * root / (2 * root + 1)


@dataclass(frozen=True)
class Bell(TimeProposal):
    """The raised cosine 1 - depth·cos(2πt): most draws from the middle, yet never none from the ends.

    With `weighted`, draws are weighed by one over the density, so that the loss stays the bound and only its
    variance changes. Without, the middle counts more: another loss, with the same best network where that is
    free to be right at every time.
    """

    depth: float = 0.8
    weighted: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.depth < 1:
            raise ValueError(f"a bell's depth must lie in [0, 1), given {self.depth}; 0 is even, 0.8 a good start")

    def times(self, position: RowTimes) -> tuple[RowTimes, RowValues]:
        """Inverts t - depth·sin(2πt)/2π by bisection."""
        low, high = torch.zeros_like(position), torch.ones_like(position)
        for _ in range(53):
            middle = (low + high) / 2
            below = middle - self.depth * torch.sin(2 * math.pi * middle) / (2 * math.pi) < position
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        # `low` and not the middle, which could round to 1.
        weight = 1 / (1 - self.depth * torch.cos(2 * math.pi * low))
        return low, weight if self.weighted else torch.ones_like(weight)
