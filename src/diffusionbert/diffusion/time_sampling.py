"""The distributions that training and estimation draw times from, with importance weights that keep them unbiased.

A time sampling maps uniform numbers in (0, 1) to times and weights by inverting its CDF. Intervals map to intervals, so
stratified draws stay stratified. Training uses the one in its configuration; an estimate uses the one that suits its
integrand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from diffusionbert.diffusion.shapes import PerSequence, Times
from diffusionbert.registry import Registry, describe, register


class TimeSampling(ABC):
    """A density on (0, 1) with an invertible CDF."""

    registry: ClassVar[Registry[TimeSampling]] = Registry(
        "time sampling", "diffusionbert.time_samplings", "diffusionbert.diffusion.time_sampling"
    )

    @abstractmethod
    def times(self, quantile: Times) -> tuple[Times, PerSequence]:
        """The times at these quantiles, and the weights of the loss there."""

    def __str__(self) -> str:
        return describe(self)


@register("uniform")
@dataclass(frozen=True)
class UniformTimes(TimeSampling):
    """All times equally often."""

    def times(self, quantile: Times) -> tuple[Times, PerSequence]:
        return quantile, torch.ones_like(quantile)


@register("early")
@dataclass(frozen=True)
class Early(TimeSampling):
    """An equal mixture of the uniform density and 1/(2√t), for integrands that grow like 1/t towards t = 0.

    In continuous time a token is masked with probability t and then has weight 1/t. Under uniform times the variance
    of that is infinite, and intervals from a few draws are too narrow; under this density it is finite. The uniform
    half keeps weights below 4/3, so bounded integrands lose almost nothing.
    """

    def times(self, quantile: Times) -> tuple[Times, PerSequence]:
        """Inverts t/2 + √t/2, a quadratic in √t."""
        root = ((1 + 8 * quantile).sqrt() - 1) / 2
        return root.square(), 4 * root / (2 * root + 1)


@register("bell")
@dataclass(frozen=True)
class Bell(TimeSampling):
    """The raised cosine 1 - depth·cos(2πt): most draws from the middle, some from every time.

    With `weighted`, draws are weighted by one over the density: the loss is still the bound, and only its variance
    changes. Without it, the middle counts more: a different loss, with the same optimum for a network that can be right
    at every time.
    """

    depth: float = 0.8
    weighted: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.depth < 1:
            raise ValueError(f"`depth` of a bell must lie in [0, 1), got {self.depth}; 0 is uniform, 0.8 a good start")

    def times(self, quantile: Times) -> tuple[Times, PerSequence]:
        """Inverts t - depth·sin(2πt)/2π by bisection."""
        low, high = torch.zeros_like(quantile), torch.ones_like(quantile)
        for _ in range(53):
            middle = (low + high) / 2
            below = middle - self.depth * torch.sin(2 * math.pi * middle) / (2 * math.pi) < quantile
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        # `low`, not the middle, which could round to 1.
        weight = 1 / (1 - self.depth * torch.cos(2 * math.pi * low))
        return low, weight if self.weighted else torch.ones_like(weight)
