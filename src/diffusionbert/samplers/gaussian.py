"""Ancestral sampling of word vectors (Ho et al. 2020, algorithm 2; Li et al. 2022, "Diffusion-LM", section 4.2).

    x_1 ~ N(0, 1),   x_s ~ q(x_s | x_t, x0 = x̂0(x_t, t))  for every step (s, t) of the grid,   w = round(x_0)

The clamping trick puts the nearest word's vector in the place of x̂0, so that a step commits to some words. One call a
step for each row with anything to write. Fewer steps than in training are a coarser grid.

Where the original's code departs: if it clamps, it clamps at all steps; its last step takes the mean, without noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks.vectors import VectorNetwork, clamp_to_words
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Gaussian
from diffusionbert.processes.gaussian import require_clamping
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import Batch, Grid, Tokens, Vectors


class GaussianAncestral(Sampler[VectorNetwork]):
    """Walks down the grid on vectors; its states show every vector as the nearest word that may be written.

    There is no distribution over words before the end, so temperature, top-k and top-p act on the last rounding alone:
    where any of them is set, its word is drawn from p(w | x) (as it is, with top-p 1); else the nearest word is taken.
    Forbidden words are never written, and never clamped to. A grid that ends before 1 goes on from the words of the
    canvas, made as noisy as they are there.
    """

    def __init__(
        self, process: Gaussian, grid: Grid, shaping: Shaping | None = None, clamped: bool | float | None = None
    ):
        """Steps from times up to `clamped` use the clamping trick; True or 1 is all of them, False or 0 none, None
        those from times at which the word is certain.
        """
        super().__init__()
        require_grid(grid, partial=True)
        require_clamping(clamped)
        self.process = process
        self.shaping = shaping or Shaping()
        self.clamped = clamped
        self.times: list[float] = grid.tolist()

    def sample(self, network: VectorNetwork, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields what the noise looks like and then the state after every step."""
        num_steps = len(self.times) - 1
        active = canvas.editable.any(dim=1)
        rows = active.nonzero()[:, 0]
        sent = canvas.rows(rows)
        calls = torch.zeros_like(canvas.example)

        def state(words: Tokens, index: int) -> State:
            tokens = canvas.tokens.clone()
            tokens[rows, : words.shape[1]] = words
            return State(tokens, canvas.row_times(self.times[index]), calls)

        x, words = self._start(network, sent, Noise(seed, num_steps))
        from_times = torch.tensor(self.times[1:], dtype=torch.float64, device=x.device)
        clamps = self.process.clamps(from_times, self.clamped, x.shape[-1], network.writable.sum()).tolist()
        yield state(words, num_steps)
        for index in reversed(range(num_steps)):
            x, words = self._step(network, sent, x, index, Noise(seed, index), clamps=clamps[index])
            calls = calls + active
            yield state(words, index)

    @torch.no_grad()
    def _start(self, network: VectorNetwork, canvas: Batch, noise: Noise) -> tuple[Vectors, Tokens]:
        """x at the grid's end, where at t = 1 nothing is left of what stood there."""
        end = len(self.times) - 1
        if self.times[end] < 1 and not bool(network.writable[canvas.tokens[canvas.editable]].all()):
            raise ValueError(
                f"a grid that ends at {self.times[end]} goes on from the words of the canvas, but some editable place "
                "holds a token that is no word: give words there, or a grid that ends at 1"
            )
        clean = network.embed(canvas.tokens)
        x = self.process.corrupt(clean, canvas.editable, canvas.example, canvas.row_times(self.times[end]), noise)
        return x, self._rounded(network, canvas, x)

    @torch.no_grad()
    def _step(
        self, network: VectorNetwork, canvas: Batch, x_t: Vectors, index: int, noise: Noise, *, clamps: bool
    ) -> tuple[Vectors, Tokens]:
        if not len(x_t):
            return x_t, canvas.tokens
        s, t = (canvas.row_times(time) for time in self.times[index : index + 2])
        guess = network(x_t, canvas.attend, t)
        if clamps:
            guess = clamp_to_words(network, guess, canvas.editable, self.shaping.forbidden)
        mean, deviation = self.process.reverse(x_t, guess, s, t)
        drawn = noise.normal(canvas.example, Purpose.GAUSS, *x_t.shape[1:]).to(x_t.dtype)
        x_s = torch.where(canvas.editable[..., None], mean + deviation * drawn, x_t)
        if index or not self._draws:
            return x_s, self._rounded(network, canvas, x_s)
        return x_s, self._drawn(network, canvas, x_s, noise)

    @property
    def _draws(self) -> bool:
        shaping = self.shaping
        return shaping.temperature != 1 or shaping.top_k is not None or shaping.top_p is not None

    def _rounded(self, network: VectorNetwork, canvas: Batch, x: Vectors) -> Tokens:
        nearest = network.nearest(x, canvas.editable, self.shaping.forbidden)
        return canvas.tokens.masked_scatter(canvas.editable, nearest)

    def _drawn(self, network: VectorNetwork, canvas: Batch, x: Vectors, noise: Noise) -> Tokens:
        log_p = self.shaping(network.log_words(x, canvas.editable))
        uniform = noise.uniform(canvas.example, Purpose.WRITE, canvas.tokens.shape[1])
        return canvas.tokens.masked_scatter(canvas.editable, draw(log_p, uniform[canvas.editable]))
