"""Hoogeboom et al. 2022, "Autoregressive diffusion models" (OA-ARDM), eq. 7; Uria et al. 2014.

    nats(x0) = Σ_{k=1..n} E_{k of n positions masked} [ 1/k · Σ_{masked i} -log f(x0_i | unmasked) ]

One token is generated at a time, in random order. For a time-agnostic network, this equals the continuous-time bound of
every schedule that treats all tokens alike, with less variance, because the number of masked positions is stratified.
A time-conditioned network is given k/n. `OrderAgnosticGrid` is the same for a time grid (Austin et al. 2021, D3PM,
eq. 1, with its terms grouped by the number of masked positions):

    nats(x0) = E_{k ~ q} E_{k of n positions masked} [ n/k · Σ_{masked i} -log f(x0_i | unmasked) ]
    q(k) = k/n · Σ over the grid's steps (s, t) of r_{s|t} · Binomial(k; n, 1 - ᾱ_t),       q(k) → 1/n on finer grids

This is the bound of `DiscreteTime` over the same grid: since every position is masked independently with probability
1 - ᾱ_t, the number of masked positions is binomial, and all sets of k positions are equally likely. q sums to 1,
because Σ_k k·Binomial(k; n, p) = n·p.

Both draw *balanced* rounds: see `_balanced_round`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import NoiseSchedule, require_grid
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, PerPosition, PositionMask, Times, Tokens, Values
from diffusionbert.diffusion.tokens import TokenStatistics, nats_of
from diffusionbert.networks.base import Network, nats_at
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    CONTINUOUS,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Objective,
    ObjectiveConfig,
    Round,
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
    is_capturable = True

    def __init__(self, mask_id: int):
        super().__init__()
        self.mask_id = mask_id

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """n/k times the cross-entropy at k masked positions; k and the positions are drawn."""
        length = x0.editable.sum(dim=1)
        masked = noise.chosen(x0, 1 + (noise.stratified_uniform(x0) * length).long())
        x_t = replace(x0, tokens=x0.tokens.masked_fill(masked, self.mask_id))
        return length[:, None] * self.next_nats(network, x0.tokens, x_t)

    def draw_round(self, network: Network, x0: Batch, noise: Noise) -> Round:
        """Draws a balanced round."""
        return _balanced_round(network, x0, noise, self.mask_id, lambda n: torch.full((n,), 1 / n).double())

    def next_nats(self, network: Network, x0: Tokens, x_t: Batch) -> PerPosition:
        """1/k times the cross-entropy at each of the k masked positions of x_t."""
        masked = x_t.editable & (x_t.tokens == self.mask_id)
        nats = masked_nats(network, replace(x_t, tokens=x0), masked, self.mask_id)
        return nats / masked.sum(dim=1, keepdim=True).clamp(min=1)


def masked_nats(network: Network, x0: Batch, masked: PositionMask, mask_id: int, t: Times | None = None) -> PerPosition:
    """-log f(x0 | unmasked) at the masked positions; t defaults to their fraction of the editable ones."""
    t = x0.fraction_of(masked) if t is None else t
    x_t = replace(x0, tokens=x0.tokens.masked_fill(masked, mask_id))
    return nats_at(network, x_t, t, masked, x0.tokens)


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

    def draw_round(self, network: Network, x0: Batch, noise: Noise) -> Round:
        """Draws a balanced round."""
        return _balanced_round(network, x0, noise, self.mask_id, self.distribution)

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


# ---- balanced rounds ------------------------------------------------------------------------------------------------
#
# The bound is Σ_i Σ_k q(k)·h_i(k), where h_i(k) is the mean of -log f(x0_i | unmasked) over all sets of k masked
# positions that contain i. A round estimates it stratum by stratum, where a stratum is an interval of width w of the
# CDF of q: it draws a level k in the stratum and a random order of the n positions, and masks ⌈n/k⌉ successive blocks
# of k positions in that order, cyclically. So *every* position is masked at least once, and
#
#     w · Σ_i ( mean of -log f(x0_i | unmasked) over the blocks that contain i  +  β·(c_i - E[c_i]) )
#
# is unbiased for the stratum's part of the bound, since each block that contains i is a uniform draw from the sets that
# contain i. Then it no longer matters which tokens are masked, only which are seen. Most of that effect comes from the
# number c_i ∈ {0, 1, 2} of i's unmasked neighbors, a control variate whose mean is known exactly: 2·(n - k)/(n - 1),
# averaged over the stratum. It also tracks the level. Strata are wide at low levels, where draws are expensive (n/k
# sequences) and vary little. The edges and β were chosen for low variance per computed sequence, with the bundled model
# on news.

_EDGES = (0.0, 0.28, 0.42, 0.54, 0.65, 0.76, 0.88, 1.0)
"""The edges of the strata; texts with fewer tokens than there are edges have one stratum per level."""
_NEIGHBOR = 1.3
"""β: the nats that an unmasked neighbor saves. The estimate is unbiased whatever the number."""
_POSITIONS_AT_ONCE = {"cpu": 4096, "cuda": 32_768}
"""The number of positions in one network call, by device."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """The masks of one sequence's round."""

    masked: Tensor
    """[M, n]: M masks over the sequence's n editable positions."""
    stratum: Tensor
    """[M]: the stratum of each mask."""
    weight: Tensor
    """[S, n]: what to multiply a stratum's sum over its masks by, at each position."""
    constant: Tensor
    """[S, n]: what the control variate adds."""


def _plan(x0: Batch, index: int, noise: Noise, distribution: Callable[[int], Tensor]) -> _Plan:
    """Draws the masks of one sequence; they depend on its key and its number of editable positions."""
    n, example = int(x0.editable[index].sum()), x0.example[index : index + 1].cpu()
    edges = torch.tensor(_EDGES if n >= len(_EDGES) else [step / n for step in range(n + 1)], dtype=torch.float64)
    low, high = edges[:-1], edges[1:]
    width, q = high - low, distribution(n).cpu()
    cumulative = q.cumsum(dim=0)
    overlap = torch.minimum(cumulative, high[:, None]) - torch.maximum(cumulative - q, low[:, None])
    mean_level = (overlap.clamp(min=0) * torch.arange(1, n + 1)).sum(dim=1) / width
    uniform = low + width * noise.uniform(example, Purpose.TIME, len(width))[0]
    level = 1 + torch.searchsorted(cumulative, uniform, right=True).clamp(max=n - 1)
    # One number per position and stratum, so that texts with the same key share the numbers of their common prefix.
    order = noise.uniform(example, Purpose.ORDER, n, len(_EDGES) - 1)[0, :, : len(width)].T
    rank = order.argsort(dim=1).argsort(dim=1)
    blocks = [math.ceil(n / k) for k in level.tolist()]
    stratum = torch.arange(len(width)).repeat_interleave(torch.tensor(blocks))
    first = torch.cat([torch.arange(count) for count in blocks]) * level[stratum]
    masked = (rank[stratum] - first[:, None]) % n < level[stratum, None]
    weight = width[:, None] / _summed(masked.double(), stratum)
    expected = (n - mean_level[stratum, None]) / max(1, n - 1) * _neighbors(torch.ones(1, n))
    seen = _neighbors((~masked).double()) - expected
    return _Plan(masked, stratum, weight, _NEIGHBOR * weight * _summed(masked * seen, stratum))


def _summed(values: Tensor, stratum: Tensor) -> Tensor:
    """[M, n] → [S, n]: the sums over the masks of each stratum."""
    return values.new_zeros(int(stratum[-1]) + 1, values.shape[1]).index_add(0, stratum, values)


def _neighbors(values: Tensor) -> Tensor:
    """The sum of the values left and right of each position."""
    return pad(values, (1, 0))[:, :-1] + pad(values, (0, 1))[:, 1:]


def _balanced_round(
    network: Network, x0: Batch, noise: Noise, mask_id: int, distribution: Callable[[int], Tensor]
) -> Round:
    """One balanced round of each sequence; q(1), …, q(n) is `distribution(n)`."""
    device = x0.tokens.device
    plans = [_plan(x0, index, noise, distribution) for index in range(len(x0.tokens))]
    sizes = tuple(len(plan.masked) for plan in plans)
    row = torch.arange(len(plans)).repeat_interleave(torch.tensor(sizes)).to(device)
    masked = x0.editable[row]
    masked = masked.masked_scatter(masked, torch.cat([plan.masked.flatten() for plan in plans]).to(device))
    at_once = max(1, _POSITIONS_AT_ONCE.get(device.type, 4096) // x0.tokens.shape[1])
    nats = []
    for rows, targets in zip(torch.split(row, at_once), torch.split(masked, at_once), strict=True):
        tokens, fraction = x0.tokens[rows], targets.sum(dim=1).double() / x0.editable[rows].sum(dim=1)
        log_f = network(tokens.masked_fill(targets, mask_id), x0.attention_mask[rows], fraction, targets)
        nats.append(nats_of(log_f, tokens, targets))
    parts = torch.zeros(len(plans), len(_EDGES) - 1, x0.tokens.shape[1], dtype=torch.float64, device=device)
    for index, (plan, drawn) in enumerate(zip(plans, torch.split(torch.cat(nats), list(sizes)), strict=True)):
        editable = x0.editable[index]
        found = plan.weight.to(device) * _summed(drawn[:, editable], plan.stratum.to(device)) + plan.constant.to(device)
        parts[index, : len(found), editable] = found
    return Round(parts, sizes)
