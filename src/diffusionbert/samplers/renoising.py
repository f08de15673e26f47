"""He et al. 2022, "DiffusionBERT": phrases that do not fit can be fixed in later steps, since all is hidden anew.

    x̂0 ~ p(x0 | x_t, t) at the hidden places, x_t elsewhere;    x_s ~ q(x_s | x̂0)    for every step (s, t)

Each step guesses the whole text and hides it afresh, so that a written word is hidden again with probability
1 - ᾱ_s. Ancestral sampling draws from q(x_s | x_t, x̂0) instead and keeps what is written.

This is ReMDM (Wang et al. 2025) with σ = 1 - ᾱ_s: its fraction then is (ᾱ_s - ᾱ_s·ᾱ_t) / (1 - ᾱ_t) = ᾱ_s, for hidden
and visible places alike, so x_s depends on x_t through x̂0 alone. It is not ReMDM's maximum, min(1, (1 - ᾱ_s) / ᾱ_t),
which is larger: as long as that is below 1, σ is the share ᾱ_t of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Process
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import Batch, Grid, Places, RowTimes


class Renoising(Sampler[Network]):
    """Walks down the grid, guessing the text and hiding it anew in every step; for every process on tokens."""

    def __init__(self, process: Process, grid: Grid, shaping: Shaping | None = None):
        super().__init__()
        require_grid(grid, partial=True)
        self.process = process
        self.shaping = shaping
        self.times: list[float] = grid.tolist()

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the prior and then the state after every step."""
        num_steps = len(self.times) - 1
        x = self.process.prior(canvas, Noise(seed, step=num_steps))
        calls = torch.zeros_like(canvas.example)
        yield State(x.tokens, canvas.row_times(self.times[num_steps]), calls)
        for index in reversed(range(num_steps)):
            s, t = (canvas.row_times(time) for time in self.times[index : index + 2])
            asked, noise = self.process.asked(x), Noise(seed, step=index)
            guess = self._guessed(network, x, asked, t, noise)
            x, calls = self.process.corrupt(guess, s, noise), calls + asked.any(dim=1)
            yield State(x.tokens, s, calls)

    @torch.no_grad()
    def _guessed(self, network: Network, x_t: Batch, asked: Places, t: RowTimes, noise: Noise) -> Batch:
        """x̂0: a word drawn from p(x0 | x_t, t) at every asked place."""
        if not bool(asked.any()):
            return x_t
        log_f = ask(network, x_t, t, asked)
        # A step down to 0 is p(x0 | x_t, t) itself.
        log_p = self.process.reverse(x_t, log_f, torch.zeros_like(t), t, self.shaping)
        uniform = noise.uniform(x_t.example, Purpose.WRITE, x_t.tokens.shape[1])
        return replace(x_t, tokens=x_t.tokens.masked_scatter(asked, draw(log_p, uniform[asked])))
