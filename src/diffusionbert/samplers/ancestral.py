"""Ancestral sampling (Ho et al. 2020, algorithm 2; Austin et al. 2021): one reverse step after another.

    x_1 ~ prior,   x_s ~ p(x_s | x_t)  for every step (s, t) of the grid, from the last to the first

Works for every process on tokens and every network; the network is asked once a step, as long as anything is hidden.
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
from diffusionbert.shapes import Batch, Grid


class Ancestral(Sampler[Network]):
    """Walks down the grid, drawing every asked place anew.

    A grid that ends before 1 goes on from there: all that is editable was hidden at that time.
    """

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
            x, calls = self._step(network, x, calls, index, seed)
            yield State(x.tokens, canvas.row_times(self.times[index]), calls)

    @torch.no_grad()
    def _step(
        self, network: Network, x_t: Batch, calls: torch.Tensor, index: int, seed: int
    ) -> tuple[Batch, torch.Tensor]:
        asked = self.process.asked(x_t)
        if not bool(asked.any()):
            return x_t, calls
        s, t = (x_t.row_times(time) for time in self.times[index : index + 2])
        log_f = ask(network, x_t, t, asked)
        log_p = self.process.reverse(x_t, log_f, s, t, self.shaping)
        uniform = Noise(seed, step=index).uniform(x_t.example, Purpose.WRITE, x_t.tokens.shape[1])
        tokens = x_t.tokens.masked_scatter(asked, draw(log_p, uniform[asked]))
        return replace(x_t, tokens=tokens), calls + asked.any(dim=1)
