"""Wang et al. 2025, "Remasking discrete diffusion models with inference-time scaling" (ReMDM), sections 3 and 4.

A step (s, t) hides a visible word v again with probability σ(v), and writes v at a hidden place with

    p(x_s = v | x_t = M) = p(v | x_t, t) · (ᾱ_s(v) - (1 - σ(v))·ᾱ_t(v)) / (1 - ᾱ_t(v)),    M otherwise

so that a word that is visible with probability ᾱ_t at t is so with probability ᾱ_s at s: whatever σ, the marginals
q(x_s | x0) are those of the schedule, as long as the fraction is a probability, σ ≤ σ_max = min(1, (1 - ᾱ_s) / ᾱ_t).
σ = 0 is ancestral sampling. The paper has one ᾱ for all words; here every word has its own, and so its own σ.

The network is asked about hidden places alone, and a visible word says nothing of whether it fits: σ is blind to it.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import torch

from diffusionbert.categorical import Shaping
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.schedules import Mean, Spindle
from diffusionbert.shapes import Batch, Grid, PerPlace, Places, RowTimes
from diffusionbert.walking import GridWalk


class Strategy(Enum):
    """How σ comes from η in [0, 1]."""

    CAP = "cap"
    """σ = min(η, σ_max)."""
    RESCALE = "rescale"
    """σ = η · σ_max."""


class Remasking(GridWalk):
    """Walks down the grid and hides some of what is written, so that it may be written better."""

    process: Absorbing

    def __init__(
        self,
        process: Absorbing,
        grid: Grid,
        eta: float,
        strategy: Strategy = Strategy.CAP,
        shaping: Shaping | None = None,
    ):
        super().__init__(process, grid, shaping)
        if isinstance(process.schedule, Spindle) and process.schedule.mean is Mean.SENTENCE:
            raise ValueError(
                f"{process.schedule} takes a word's survival from its sentence, which changes when words are hidden "
                "again, so that the marginals would not hold; use Mean.CORPUS, or Renoising, which claims none"
            )
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must lie in [0, 1], given {eta}; 0 never hides a word again")
        self.eta = eta
        self.strategy = strategy

    @torch.no_grad()
    def step(self, network: Network, x_t: Batch, asked: Places, s: RowTimes, t: RowTimes, noise: Noise) -> Batch:
        """A word at every hidden place, drawn by a step down to 0, which is p(v | x_t, t); then some are hidden."""
        words = self.written(network, x_t, asked, torch.zeros_like(t), t, noise)
        alpha_s, alpha_t = (self.process.survival(words, time) for time in (s, t))
        sigma = self._sigma(alpha_s, alpha_t)
        # A word that cannot be hidden at t and yet is believed in (no reweighting) is revealed at once.
        revealed = torch.where(alpha_t < 1, (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), 1.0)
        visible = torch.where(asked, revealed, 1 - sigma)
        # Where nothing is editable, survival and so `visible` are 1.
        hidden = noise.per_place(x_t, Purpose.REMASK) >= visible
        return replace(x_t, tokens=words.tokens.masked_fill(hidden, self.process.mask_id))

    def _sigma(self, alpha_s: PerPlace, alpha_t: PerPlace) -> PerPlace:
        # Where ᾱ_t = 0 no word is visible, and σ plays no part.
        highest = torch.where(alpha_t > 0, torch.minimum(alpha_t, 1 - alpha_s) / alpha_t, 0.0)
        return highest.clamp(max=self.eta) if self.strategy is Strategy.CAP else self.eta * highest
