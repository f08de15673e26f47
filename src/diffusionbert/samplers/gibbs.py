"""Wang & Cho 2019, "BERT has a mouth, and it must speak": sequential sampling, and Gibbs sampling.

    first pass    the editable places are written from all `[MASK]`, in an order drawn for each row or left to right
    sweeps        one place is hidden, and drawn again from f(· | all other words): a random one, or the next

An iteration is one call of the network. With fewer iterations than a row has places, the first pass writes several at
once, evenly: of n places, ⌊(k + 1)·n / m⌋ are written after iteration k = 0, 1, …, m - 1, m the lesser of both. With as
many, it is the order-agnostic product of conditionals, exact if f is. Sweeps leave a language alone if f holds its
conditionals; those of a network fit no joint, and then what they converge to depends on the scan.

The authors' own code picks a random place in every iteration from the start on, one for all rows of a batch, so that
some may never be written; here the first pass leaves none out, as He et al. 2022 ("DiffusionBERT") describe it.

Words come from f alone: it knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

import torch

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.shapes import Batch, Places, RowCounts
from diffusionbert.walking import HiddenShare, due_after


class Order(Enum):
    """Which place comes next, in the first pass and in sweeps."""

    RANDOM = "random"
    """Each row in an order of its own; in sweeps any place, also the last one again."""
    LEFT_TO_RIGHT = "left to right"


class Gibbs(Sampler[Network]):
    """Writes place by place, and goes on rewriting for as many iterations as are left.

    Every row with anything to write takes all iterations. A network that wants a time is told the share of the row's
    editable places that are hidden when it is asked, times `end`, the share of its words that are editable.
    """

    def __init__(
        self,
        mask_id: int,
        iterations: int,
        order: Order = Order.RANDOM,
        shaping: Shaping | None = None,
        end: float = 1.0,
    ) -> None:
        super().__init__()
        if iterations < 1:
            raise ValueError(f"writing takes at least 1 iteration, given {iterations}; as many as places is usual")
        self.mask_id = mask_id
        self.iterations = iterations
        self.order = order
        self.shaping = shaping or Shaping()
        self.time = HiddenShare(mask_id, end)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the empty canvas and then the state after every iteration."""
        x = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, self.mask_id))
        calls = torch.zeros_like(canvas.example)
        yield State(x.tokens, self.time(x), calls)
        if not bool(canvas.editable.any()):
            return
        for number in range(self.iterations):
            x = self._rewrite(network, x, self._due(x, number, seed), Noise(seed, step=number))
            calls = calls + canvas.editable.any(dim=1)
            yield State(x.tokens, self.time(x), calls)

    def _due(self, x: Batch, number: int, seed: int) -> Places:
        """The places that this iteration writes: hidden ones, or one that is written already."""
        length = x.editable.sum(dim=1)
        due = due_after(number, length, self.iterations)
        first = self._earliest(x, due, Noise(seed)) & (x.tokens == self.mask_id)
        if self.order is Order.RANDOM:
            # The first pass has used step 0 of this purpose, and sweeps begin at step 1 or later.
            again = Noise(seed, step=number).chosen(x, torch.ones_like(length))
        else:
            # A row that comes to sweeps has taken n iterations for its first pass, so this begins at its first place.
            again = x.editable & (x.editable.cumsum(dim=1) == 1 + (number % length.clamp(min=1))[:, None])
        return torch.where((number < length.clamp(max=self.iterations))[:, None], first, again)

    def _earliest(self, x: Batch, number: RowCounts, noise: Noise) -> Places:
        """So many editable places of each row, the first of its order."""
        if self.order is Order.RANDOM:
            return noise.chosen(x, number)
        return x.editable & (x.editable.cumsum(dim=1) <= number[:, None])

    @torch.no_grad()
    def _rewrite(self, network: Network, x: Batch, due: Places, noise: Noise) -> Batch:
        hidden = replace(x, tokens=x.tokens.masked_fill(due, self.mask_id))
        log_p = self.shaping(ask(network, hidden, self.time(hidden), due))
        uniform = noise.per_place(x, Purpose.WRITE)
        return replace(x, tokens=x.tokens.masked_scatter(due, draw(log_p, uniform[due])))
