"""What samplers share: the walk down a grid of times, all rows together, and rounds that write so many places each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Process
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import Batch, Grid, Places, RowCounts, RowTimes


class GridWalk(Sampler[Network]):
    """Walks down a grid from noise to text, all rows together, one step after another.

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
            s, t = (canvas.row_times(time) for time in self.times[index : index + 2])
            asked = self.process.asked(x)
            x, calls = self.step(network, x, asked, s, t, Noise(seed, step=index)), calls + asked.any(dim=1)
            yield State(x.tokens, s, calls)

    @abstractmethod
    def step(self, network: Network, x_t: Batch, asked: Places, s: RowTimes, t: RowTimes, noise: Noise) -> Batch:
        """Draws x_s; the network may be asked for the asked places, once."""

    @torch.no_grad()
    def written(self, network: Network, x_t: Batch, asked: Places, s: RowTimes, t: RowTimes, noise: Noise) -> Batch:
        """x_t with every asked place drawn from p(x_s | x_t)."""
        if not bool(asked.any()):
            return x_t
        log_f = ask(network, x_t, t, asked)
        log_p = self.process.reverse(x_t, log_f, s, t, self.shaping)
        uniform = noise.per_place(x_t, Purpose.WRITE)
        return replace(x_t, tokens=x_t.tokens.masked_scatter(asked, draw(log_p, uniform[asked])))


@final
@dataclass(frozen=True)
class HiddenShare:
    """The time where the sampler and not the noise chooses what is hidden: the share of editable places that is.

    Times `end`, the share of the row's words that are editable.
    """

    mask_id: int
    end: float = 1.0

    def __call__(self, x: Batch) -> RowTimes:
        """Of each row, what a network that wants a time is told."""
        return self.end * x.share_of(x.tokens == self.mask_id)


def due_after(number: int, num_places: RowCounts, num_rounds: int) -> RowCounts:
    """How many of n places are written after round k = 0, 1, …: ⌊(k + 1)·n / m⌋, m the lesser of n and all rounds."""
    due: RowCounts = (number + 1) * num_places // num_places.clamp(min=1, max=num_rounds)
    return due
