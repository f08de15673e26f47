"""Savinov et al. 2022, "Step-unrolled denoising autoencoders for text generation" (SUNDAE), section 2.2.

    x_0: uniform random words;   x_k ~ f(· | x_{k-1}), each place on its own, for k = 1 … steps

The paper draws at a temperature below 1 and, for unconditional text, only a random share of the places in each step,
because words that change at the same time do not know of each other. Here the first step writes all places whatever
the share, so that no random word is left. Its decoding for translation (where the words it is least sure of take the
likeliest answer to a second look) and its prediction of lengths are left out: lengths are given.

The law of the text after some steps is known to nobody, so there is no likelihood to keep and any shaping is fair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Uniform
from diffusionbert.schedules import Linear
from diffusionbert.shapes import Batch, Places, TokenSet


class Refining(Sampler[Network]):
    """Corrects random words step by step.

    `update` is the share of a row's places that a step after the first may change, rounded up. A network that wants a
    time is always told 1, as when it learnt. Where a step is deterministic (`top_k=1`, all places), a row that no
    longer changes is done: every further step would write the same.
    """

    def __init__(self, writable: TokenSet, steps: int, shaping: Shaping | None = None, update: float = 1.0):
        super().__init__()
        if steps < 1:
            raise ValueError(f"writing takes at least 1 step, given {steps}; 16 is a quick start")
        if not 0 < update <= 1:
            raise ValueError(f"the share of places that a step may change lies in (0, 1], given {update}; 1 is all")
        self.steps = steps
        self.shaping = shaping or Shaping()
        self.update = update
        self.process = Uniform(Linear(), writable)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields random words and then the state after every step, until no row can change."""
        x = self.process.prior(canvas, Noise(seed))
        moving = canvas.editable.any(dim=1)
        calls = torch.zeros_like(canvas.example)
        yield State(x.tokens, moving.double(), calls)
        for number in range(1, self.steps + 1):
            if not bool(moving.any()):
                return
            before, noise, calls = x, Noise(seed, number), calls + moving
            due = x.editable if number == 1 else self._share(x, noise)
            x = self._refine(network, x, due & moving[:, None], noise)
            if self.shaping.top_k == 1 and self.update == 1:
                moving = (x.tokens != before.tokens).any(dim=1)
            yield State(x.tokens, moving.double() * (1 - number / self.steps), calls)

    def _share(self, x: Batch, noise: Noise) -> Places:
        """The random places of each row that a step may change."""
        share = self.update * x.editable.sum(dim=1).double()
        return noise.chosen(x, (share - 1e-9).ceil().long())  # or 0.7 of 10 places, 7.000000000000001, would be 8

    @torch.no_grad()
    def _refine(self, network: Network, x: Batch, due: Places, noise: Noise) -> Batch:
        log_p = self.shaping(ask(network, x, x.row_times(1.0), due))
        uniform = noise.per_place(x, Purpose.WRITE)
        return replace(x, tokens=x.tokens.masked_scatter(due, draw(log_p, uniform[due])))
