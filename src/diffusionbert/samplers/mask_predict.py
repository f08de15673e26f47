"""Ghazvininejad et al. 2019, "Mask-Predict", section 3: predict everything hidden, hide the least sure again.

    round k = 1 … T:  every hidden place gets a word and its probability,
                      then the ⌊n·(T - k) / T⌋ least probable of all n editable places of the row are hidden again

A place that was not predicted in this round keeps the probability it got when it was. The paper takes the likeliest
word (`Shaping(top_k=1)`); here words are drawn, as everywhere. They come from f and not from f·(1 - ᾱ_t), since the
sampler and not the noise chooses what is hidden: it knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from diffusionbert.categorical import Shaping, draw, log_prob_of
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.schedules import uniform_grid
from diffusionbert.shapes import Batch, PerPlace, Places, per_place
from diffusionbert.walking import HiddenShare


class MaskPredict(Sampler[Network]):
    """Writes all in each round and takes the worst back.

    A row of fewer places than rounds is done early. A network that wants a time is told the share of the row's
    editable places that are hidden, times `end`: (T - k) / T, rounded to whole places.
    """

    def __init__(self, process: Absorbing, num_steps: int, shaping: Shaping | None = None, end: float = 1.0):
        super().__init__()
        uniform_grid(num_steps, end)  # refuses what makes no grid
        self.process = process
        self.num_steps = num_steps
        self.shaping = shaping or Shaping()
        self.time = HiddenShare(process.mask_id, end)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the prior and then the state after every round, until no row has anything hidden."""
        x = self.process.prior(canvas, Noise(seed))
        calls = torch.zeros_like(canvas.example)
        probability = torch.zeros_like(x.tokens, dtype=torch.float64)
        yield State(x.tokens, self.time(x), calls)
        for number in range(1, self.num_steps + 1):
            hidden = self.process.asked(x)
            if not bool(hidden.any()):
                return
            x, probability = self._predict(network, x, hidden, probability, Noise(seed, step=number))
            x, calls = self._hide(x, probability, number), calls + hidden.any(dim=1)
            yield State(x.tokens, self.time(x), calls)

    @torch.no_grad()
    def _predict(
        self, network: Network, x: Batch, hidden: Places, probability: PerPlace, noise: Noise
    ) -> tuple[Batch, PerPlace]:
        """A word at every hidden place, and how probable it was."""
        log_f = ask(network, x, self.time(x), hidden)
        # The network's own probability among the words that may be written: after top_k=1 every word were certain.
        log_p = Shaping(forbidden=self.shaping.forbidden)(log_f)
        uniform = noise.per_place(x, Purpose.WRITE)
        words = draw(self.shaping(log_p), uniform[hidden])
        now = per_place(log_prob_of(log_p, words).exp(), hidden)
        return replace(x, tokens=x.tokens.masked_scatter(hidden, words)), torch.where(hidden, now, probability)

    def _hide(self, x: Batch, probability: PerPlace, number: int) -> Batch:
        """Hides the places of a row that are least probable, as many as this round leaves hidden."""
        num_hidden = x.editable.sum(dim=1) * (self.num_steps - number) // self.num_steps
        order = probability.masked_fill(~x.editable, torch.inf).argsort(dim=1, stable=True)
        hidden = order.argsort(dim=1) < num_hidden[:, None]
        return replace(x, tokens=x.tokens.masked_fill(hidden, self.process.mask_id))
