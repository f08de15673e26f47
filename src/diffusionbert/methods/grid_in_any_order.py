"""Austin et al. 2021 (D3PM), eq. 1, its terms gathered by how many places are hidden (Hoogeboom et al. 2022, OA-ARDM).

    nats(x0) = Σ_{k=1..n} c_k · E_{k of n places hidden} [ Σ_{hidden i} -log f(x0_i | visible) ]
    c_k = Σ over the grid's steps (s, t) of r_{s|t} · Binomial(k; n, 1 - ᾱ_t),        c_k → 1/k as the grid grows finer

Under a schedule that treats all tokens alike, each place is hidden by itself with probability 1 - ᾱ_t, so their number
is binomial and all sets of k places are as likely. A time-agnostic network's answer depends on the set alone, and this
is then the very bound of `discrete` over the same grid. Drawing k evenly instead of the step scatters as little as
`any_order` does, and with the same noise the two draw the same places: what a grid costs beside its limit is seen
without noise. For estimates; training has `discrete`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusionbert.categorical import log_prob_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.schedules import NoiseSchedule, require_grid
from diffusionbert.shapes import Batch, Grid, PerPlace, RowCounts, RowValues, exact_bits, from_bits, per_place


class GridInAnyOrder(Objective[Network]):
    """The bound over a grid of steps, for a time-agnostic network and a schedule that treats all tokens alike."""

    _visible: Tensor

    def __init__(self, schedule: NoiseSchedule, grid: Grid, mask_id: int):
        super().__init__()
        require_grid(grid)
        if schedule.by_token:
            raise ValueError(f"under {schedule} not all sets of places are as likely: use DiscreteTime")
        self.mask_id = mask_id
        survival = schedule.survival(grid.double(), torch.ones(1, dtype=torch.float64))
        self.register_buffer("_visible", exact_bits(survival), persistent=False)

    @property
    def likelihood(self) -> Likelihood:
        """A bound."""
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The bound at one drawn number of hidden places."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """n·c_k times the cross-entropy of k hidden places, k and the places drawn."""
        length = x0.editable.sum(dim=1)
        num_hidden = 1 + (noise.position(x0) * length).long()
        order = noise.uniform(x0.example, Purpose.ORDER, x0.tokens.shape[1]).masked_fill(~x0.editable, torch.inf)
        hidden = x0.editable & (order.argsort(dim=1).argsort(dim=1) < num_hidden[:, None])
        log_f = network(
            x0.tokens.masked_fill(hidden, self.mask_id), x0.attend, num_hidden / length.clamp(min=1), hidden
        )
        weight = length * self.weights(length, num_hidden)
        return weight[:, None] * per_place(-log_prob_of(log_f, x0.tokens[hidden]), hidden)

    def weights(self, length: RowCounts, num_hidden: RowCounts) -> RowValues:
        """c_k for rows of n places of which k are hidden."""
        visible = from_bits(self._visible)
        reveal = (visible[:-1] - visible[1:]) / (1 - visible[1:])
        n, k = length[:, None].double(), num_hidden[:, None].double()
        log_chance = torch.xlogy(k, 1 - visible[1:]) + torch.xlogy(n - k, visible[1:])
        log_sets = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        weights: RowValues = (reveal * (log_sets + log_chance).exp()).sum(dim=1)
        return weights
