"""First-hitting sampling (Zheng et al. 2024, "Masked diffusion models are secretly time-agnostic masked models").

Where a schedule treats all words alike, the interval (s, t) of the grid in which a hidden place is revealed does not
depend on what is written there or elsewhere:

    P(revealed in (s, t)) = (ᾱ_s - ᾱ_t) / (1 - ᾱ_end)        for each place on its own
    word ~ f(v | x_t, t)                                     shaped, when its interval comes

So the intervals are drawn first, and the network is asked in those alone, told each row's own t: at most min(L, T)
calls a row. The texts are distributed exactly as `Ancestral` distributes them over the same grid, with any network.
A finer grid costs nothing: continuous time is `uniform_grid(1_000_000)`.

Schedules that treat words differently, and uniform noise, are not for this module.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import Batch, Grid, PerPlace, Places, RowTimes, Tokens, exact_bits, from_bits


class FirstHitting(Sampler[Network]):
    """Draws when each place is revealed, then asks the network at those times only.

    In a round every unfinished row goes on to its own next time. A grid that ends before 1 goes on from there.
    """

    _grid: Tensor

    def __init__(self, process: Absorbing, grid: Grid, shaping: Shaping | None = None):
        super().__init__()
        require_grid(grid, partial=True)
        if process.schedule.by_token:
            raise ValueError(
                f"under {process.schedule} the time at which a place is revealed depends on its word, so it cannot be "
                "drawn first; use SkipExact with a time-agnostic network, Ancestral with any other"
            )
        self.process = process
        self.shaping = shaping
        self.register_buffer("_grid", exact_bits(grid), persistent=False)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the prior and then the state after every round."""
        noise = Noise(seed)
        grid = from_bits(self._grid).to(canvas.tokens.device)
        x = self.process.prior(canvas, noise)
        tokens, pending = x.tokens, self.process.asked(x)
        interval = self._intervals(grid, noise.per_place(x, Purpose.REVEAL))
        # A place is written once, so one number each is enough for its word.
        uniform = noise.per_place(x, Purpose.WRITE)
        calls = torch.zeros_like(canvas.example)
        yield State(tokens, torch.where(pending.any(dim=1), grid[-1], 0.0), calls)
        while bool(pending.any()):
            calls = calls + pending.any(dim=1)
            latest = torch.where(pending, interval, -1).amax(dim=1)
            due = pending & (interval == latest[:, None])
            tokens = self._write(network, tokens, x.attend, grid[latest + 1], due, uniform)
            pending = pending & ~due
            yield State(tokens, torch.where(pending.any(dim=1), grid[latest], 0.0), calls)

    def _intervals(self, grid: Grid, uniform: PerPlace) -> Tensor:
        """For each place the k of the interval (grid[k], grid[k + 1]) in which it is revealed."""
        hidden = 1 - self.process.schedule.survival(grid, torch.ones_like(grid))
        interval = torch.searchsorted(hidden, uniform * hidden[-1], right=True) - 1
        # Where the grid ends so early that rounding leaves nothing hidden, the first step reveals.
        return interval.clamp(max=len(grid) - 2)

    @torch.no_grad()
    def _write(
        self, network: Network, tokens: Tokens, attend: Places, t: RowTimes, due: Places, uniform: PerPlace
    ) -> Tokens:
        rows = due.any(dim=1)
        log_p = network(tokens[rows], attend[rows], t[rows], due[rows])
        if self.shaping is not None:
            log_p = self.shaping(log_p)
        return tokens.masked_scatter(due, draw(log_p, uniform[due]))
