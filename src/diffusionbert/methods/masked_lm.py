"""Devlin et al. 2019, "BERT": masked language modelling, the ordinary pretraining that DiffusionBERT starts from.

    loss(x0) = 1/rate · Σ over chosen places i of -log f(x0_i | x with the chosen places hidden)

Each editable place is chosen with probability `rate` (15 %); a chosen one turns into `[MASK]` (80 %), into another
word (10 %) or stays (10 %). Divided by the rate, a sentence's loss is an estimate of what all its words cost.
The next-sentence loss of the original is left out, as in RoBERTa.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.shapes import Batch, PerPlace, RowValues, TokenSet


class MaskedLM(Objective[Network]):
    """Cross-entropy at a fixed share of places; the network is always told the time `rate`."""

    writable_ids: Tensor

    def __init__(self, mask_id: int, writable: TokenSet, rate: float = 0.15):
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"the share of masked places must lie in (0, 1), given {rate}; BERT's is 0.15")
        self.mask_id = mask_id
        self.rate = rate
        self.register_buffer("writable_ids", writable.nonzero()[:, 0], persistent=False)

    @property
    def likelihood(self) -> Likelihood:
        """Pseudo: what words cost when most others are seen."""
        return Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The cross-entropy at the chosen places over the rate, some of them left or replaced."""
        chosen = x0.editable & (noise.per_place(x0, Purpose.CORRUPT) < self.rate)
        fate = noise.per_place(x0, Purpose.KEEP)
        other = (noise.per_place(x0, Purpose.REPLACE) * len(self.writable_ids)).long()
        hidden = x0.tokens.masked_fill(chosen & (fate < 0.8), self.mask_id)
        replaced = torch.where(chosen & (fate >= 0.9), self.writable_ids[other], hidden)
        return self._cost(network, x0, replace(x0, tokens=replaced), chosen).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """The cross-entropy at the chosen places over the rate, all of them hidden."""
        chosen = x0.editable & (noise.per_place(x0, Purpose.CORRUPT) < self.rate)
        return self._cost(network, x0, replace(x0, tokens=x0.tokens.masked_fill(chosen, self.mask_id)), chosen)

    def _cost(self, network: Network, x0: Batch, x: Batch, chosen: Tensor) -> PerPlace:
        log_f = network(x.tokens, x.attend, x.row_times(self.rate), chosen)
        return nats_of(log_f, x0.tokens, chosen) / self.rate
