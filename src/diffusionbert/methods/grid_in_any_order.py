"""Austin et al. 2021 (D3PM), eq. 1, its terms gathered by how many places are hidden (Hoogeboom et al. 2022, OA-ARDM).

    nats(x0) = E_{k ~ q} E_{k of n places hidden} [ n/k · Σ_{hidden i} -log f(x0_i | visible) ]
    q(k) = k/n · Σ over the grid's steps (s, t) of r_{s|t} · Binomial(k; n, 1 - ᾱ_t),        q(k) → 1/n on finer grids

Under a schedule that treats all tokens alike, each place is hidden by itself with probability 1 - ᾱ_t, so their number
is binomial, and all sets of k places are as likely. A time-agnostic network's answer depends on the set alone, and this
is then the very bound of `discrete` over the same grid; q sums to 1, because Σ_k k·Binomial(k; n, p) = n·p. It scatters
as little as `any_order`, and with the same noise the two hide nearly the same places, so that what a grid costs beside
its limit is hardly blurred. For estimates; training has `discrete`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.schedules import NoiseSchedule, require_grid
from diffusionbert.shapes import Batch, Grid, PerPlace, RowCounts, RowTimes, RowValues, Values


class GridInAnyOrder(Objective[Network]):
    """The bound over a grid of steps, for a time-agnostic network and a schedule that treats all tokens alike."""

    def __init__(self, schedule: NoiseSchedule, grid: Grid, mask_id: int):
        super().__init__()
        require_grid(grid)
        if schedule.by_token:
            raise ValueError(f"under {schedule} not all sets of places are as likely: use DiscreteTime")
        self.mask_id = mask_id
        self._visible = schedule.survival(grid.cpu().double(), torch.ones(1, dtype=torch.float64))
        self._laws: dict[int, Tensor] = {}

    @property
    def likelihood(self) -> Likelihood:
        """A bound."""
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The bound at one drawn number of hidden places."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """n/k times the cross-entropy of k hidden places, k and the places drawn."""
        length = x0.editable.sum(dim=1)
        num_hidden = self._num_hidden(length, noise.position(x0))
        hidden = noise.chosen(x0, num_hidden)
        log_f = network(x0.tokens.masked_fill(hidden, self.mask_id), x0.attend, x0.share_of(hidden), hidden)
        weight = length / num_hidden.clamp(min=1)
        return weight[:, None] * nats_of(log_f, x0.tokens, hidden)

    def law(self, length: int) -> Values:
        """q(1), …, q(n)."""
        if length not in self._laws:
            visible, later = self._visible[:-1], self._visible[1:]
            reveal = (visible - later) / (1 - later)
            n = visible.new_tensor(length)
            k = torch.arange(1, length + 1, dtype=visible.dtype, device=visible.device)[:, None]
            log_sets = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
            log_chance = torch.xlogy(k, 1 - later) + torch.xlogy(n - k, later)
            self._laws[length] = (k / n * reveal * (log_sets + log_chance).exp()).sum(dim=1)
        return self._laws[length]

    def _num_hidden(self, length: RowCounts, position: RowTimes) -> RowCounts:
        """The k up to which the law sums to the position; every row draws from the law of its own length."""
        num_hidden = torch.zeros_like(length)
        for n in {*length.tolist()}:
            rows = length == n
            up_to = self.law(n).cumsum(dim=0).to(position.device)
            num_hidden[rows] = 1 + torch.searchsorted(up_to, position[rows], right=True).clamp(max=n - 1)
        return num_hidden
