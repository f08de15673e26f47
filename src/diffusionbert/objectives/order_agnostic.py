"""Hoogeboom et al. 2022, "Autoregressive diffusion models" (OA-ARDM), eq. 7; Uria et al. 2014.

    nats(x0) = Σ_{k=1..n} E_{k of n positions masked} [ 1/k · Σ_{masked i} -log f(x0_i | unmasked) ]

One token is generated at a time, in random order. For a time-agnostic network this equals the continuous-time bound of
every schedule that treats all tokens alike, with less variance, because the number of masked positions is stratified.
A time-conditioned network is given k/n. `OrderAgnosticGrid` is the same for a time grid (Austin et al. 2021, D3PM,
eq. 1, its terms collected by the number of masked positions):

    nats(x0) = E_{k ~ q} E_{k of n positions masked} [ n/k · Σ_{masked i} -log f(x0_i | unmasked) ]
    q(k) = k/n · Σ over the grid's steps (s, t) of r_{s|t} · Binomial(k; n, 1 - ᾱ_t),       q(k) → 1/n on finer grids

This is the bound of `DiscreteTime` over the same grid: where every position is masked independently with probability
1 - ᾱ_t, the number of masked positions is binomial and all sets of k positions are equally likely. q sums to 1,
because Σ_k k·Binomial(k; n, p) = n·p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import NoiseSchedule, require_grid
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, PerPosition, PositionMask, Times, Tokens, Values
from diffusionbert.diffusion.tokens import TokenStatistics, nats_of
from diffusionbert.networks.base import Network
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    CONTINUOUS,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Objective,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
    TimeGrid,
)
from diffusionbert.registry import register


@register("order-agnostic")
@dataclass(frozen=True)
class OrderAgnosticConfig(ObjectiveConfig):
    """OA-ARDM: one token at a time, in random order."""

    def build(self, statistics: TokenStatistics) -> OrderAgnostic:
        return OrderAgnostic(statistics.mask_id)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ORDER_AGNOSTIC,))


class OrderAgnostic(Objective[Network]):
    """The bound averaged over all orders of generation; one order and one of its steps are drawn per sequence."""

    likelihood = Likelihood.BOUND  # orders are averaged outside the logarithm

    def __init__(self, mask_id: int):
        super().__init__()
        self.mask_id = mask_id

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """n/k times the cross-entropy at k masked positions; k and the positions are drawn."""
        length = x0.editable.sum(dim=1)
        masked = noise.chosen(x0, 1 + (noise.stratified_uniform(x0) * length).long())
        x_t = replace(x0, tokens=x0.tokens.masked_fill(masked, self.mask_id))
        return length[:, None] * self.next_nats(network, x0.tokens, x_t)

    def next_nats(self, network: Network, x0: Tokens, x_t: Batch) -> PerPosition:
        """1/k times the cross-entropy at each of the k masked positions of x_t."""
        masked = x_t.editable & (x_t.tokens == self.mask_id)
        nats = masked_nats(network, replace(x_t, tokens=x0), masked, self.mask_id)
        return nats / masked.sum(dim=1, keepdim=True).clamp(min=1)


def masked_nats(network: Network, x0: Batch, masked: PositionMask, mask_id: int, t: Times | None = None) -> PerPosition:
    """-log f(x0 | unmasked) at the masked positions; t is their share of the editable ones, unless given."""
    t = x0.fraction_of(masked) if t is None else t
    log_f = network(x0.tokens.masked_fill(masked, mask_id), x0.attend, t, masked)
    return nats_of(log_f, x0.tokens, masked)


ORDER_AGNOSTIC = ScoringQuantity(
    CONTINUOUS,
    LikelihoodDefinition(time=TimeGrid(), estimator=Estimator.ORDER_AGNOSTIC),
    lambda statistics: OrderAgnostic(statistics.mask_id),
)
"""The continuous-time bound of a time-agnostic network under a schedule that treats all tokens alike."""


class OrderAgnosticGrid(Objective[Network]):
    """The T-step bound of a time-agnostic network under a schedule that treats all tokens alike; for estimates."""

    likelihood = Likelihood.BOUND

    def __init__(self, schedule: NoiseSchedule, grid: Grid, mask_id: int):
        super().__init__()
        require_grid(grid)
        if schedule.by_token:
            raise ValueError(f"under {schedule} not all sets of positions are equally likely; use DiscreteTime")
        self.mask_id = mask_id
        self._survival = schedule.survival(grid.cpu().double(), torch.ones(1, dtype=torch.float64))
        self._distributions: dict[int, Tensor] = {}

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """n/k times the cross-entropy at k masked positions; k and the positions are drawn."""
        length = x0.editable.sum(dim=1)
        num_masked = self._num_masked(length, noise.stratified_uniform(x0))
        weight = length / num_masked.clamp(min=1)
        return weight[:, None] * masked_nats(network, x0, noise.chosen(x0, num_masked), self.mask_id)

    def distribution(self, length: int) -> Values:
        """q(1), …, q(n)."""
        if length not in self._distributions:
            before, after = self._survival[:-1], self._survival[1:]
            unmasking = (before - after) / (1 - after)
            n = before.new_tensor(length)
            k = torch.arange(1, length + 1, dtype=before.dtype, device=before.device)[:, None]
            log_sets = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
            log_probability = torch.xlogy(k, 1 - after) + torch.xlogy(n - k, after)
            self._distributions[length] = (k / n * unmasking * (log_sets + log_probability).exp()).sum(dim=1)
        return self._distributions[length]

    def _num_masked(self, length: Counts, uniform: Times) -> Counts:
        """Draws k ~ q by inverting the cumulative sum of q; every sequence has the q of its own length."""
        num_masked = torch.zeros_like(length)
        for n in {*length.tolist()}:
            sequences = length == n
            cumulative = self.distribution(n).cumsum(dim=0).to(uniform.device)
            num_masked[sequences] = 1 + torch.searchsorted(cumulative, uniform[sequences], right=True).clamp(max=n - 1)
        return num_masked
