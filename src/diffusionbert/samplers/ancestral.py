"""Ancestral sampling (Ho et al. 2020, algorithm 2; Austin et al. 2021): one reverse step after another.

    x_1 ~ prior,   x_s ~ p(x_s | x_t)  for every step (s, t) of the grid, from the last to the first

Works for every process on tokens and every network; the network is asked once a step, as long as anything is hidden.
"""

from __future__ import annotations

from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, Places, RowTimes
from diffusionbert.walking import GridWalk


class Ancestral(GridWalk):
    """Draws every asked place anew in every step."""

    def step(self, network: Network, x_t: Batch, asked: Places, s: RowTimes, t: RowTimes, noise: Noise) -> Batch:
        """x_s ~ p(x_s | x_t)."""
        return self.written(network, x_t, asked, s, t, noise)
