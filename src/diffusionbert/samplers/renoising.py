"""He et al. 2022, "DiffusionBERT": phrases that do not fit can be fixed in later steps, since all is hidden anew.

    x̂0 ~ p(x0 | x_t, t) at the hidden places, x_t elsewhere;    x_s ~ q(x_s | x̂0)    for every step (s, t)

Each step guesses the whole text and hides it afresh, so that a written word is hidden again with probability
1 - ᾱ_s. Ancestral sampling draws from q(x_s | x_t, x̂0) instead and keeps what is written.

This is ReMDM (Wang et al. 2025) with σ = 1 - ᾱ_s: its fraction then is (ᾱ_s - ᾱ_s·ᾱ_t) / (1 - ᾱ_t) = ᾱ_s, for hidden
and visible places alike, so x_s depends on x_t through x̂0 alone. It is not ReMDM's maximum, min(1, (1 - ᾱ_s) / ᾱ_t),
which is larger: as long as that is below 1, σ is the share ᾱ_t of it.
"""

from __future__ import annotations

import torch

from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, Places, RowTimes
from diffusionbert.walking import GridWalk


class Renoising(GridWalk):
    """Guesses the text and hides it anew in every step; for every process on tokens."""

    def step(self, network: Network, x_t: Batch, asked: Places, s: RowTimes, t: RowTimes, noise: Noise) -> Batch:
        """x̂0, hidden afresh; a step down to 0 is p(x0 | x_t, t) itself."""
        guess = self.written(network, x_t, asked, torch.zeros_like(t), t, noise)
        return self.process.corrupt(guess, s, noise)
