"""Devlin et al. 2019, "BERT": masked language modelling, the ordinary pretraining that DiffusionBERT starts from.

    loss(x0) = 1/rate · Σ over selected positions i of -log f(x0_i | x with the selected positions masked)

Each editable position is selected with probability `rate` (15 %); a selected token becomes `[MASK]` (80 %), another
token (10 %) or stays (10 %). Divided by the rate, the loss of a sequence estimates the cost of all its tokens.
The next-sentence loss of the original is left out, as in RoBERTa.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionbert.diffusion.categorical import nats_of
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, TokenSet
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.base import Network
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.objectives.base import Likelihood, Objective
from diffusionbert.objectives.config import ObjectiveConfig, ScoringQuantities
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC
from diffusionbert.registry import register


@register("masked-lm")
@dataclass(frozen=True)
class MaskedLMConfig(ObjectiveConfig):
    """BERT: ordinary masked-language-model pretraining."""

    rate: float = 0.15
    """The share of positions that are masked."""

    is_pretraining = True

    def build(self, statistics: TokenStatistics) -> MaskedLM:
        return MaskedLM(statistics.mask_id, statistics.allowed, self.rate)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ORDER_AGNOSTIC,))


class MaskedLM(Objective[Network]):
    """Cross-entropy at a fixed share of positions; a time-conditioned network is always given the time `rate`."""

    allowed_ids: Tensor

    def __init__(self, mask_id: int, allowed: TokenSet, rate: float = 0.15):
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"`rate`, the share of masked positions, must lie in (0, 1), got {rate}; BERT's is 0.15")
        self.mask_id = mask_id
        self.rate = rate
        self.register_buffer("allowed_ids", allowed.nonzero()[:, 0], persistent=False)

    @property
    def likelihood(self) -> Likelihood:
        """Pseudo: the cost of tokens when most others are unmasked."""
        return Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        """The cross-entropy at the selected positions over the rate; some of them are kept or replaced."""
        selected = x0.editable & (noise.per_position(x0, Purpose.CORRUPT) < self.rate)
        outcome = noise.per_position(x0, Purpose.KEEP)
        other = (noise.per_position(x0, Purpose.REPLACE) * len(self.allowed_ids)).long()
        masked = x0.tokens.masked_fill(selected & (outcome < 0.8), self.mask_id)
        replaced = torch.where(selected & (outcome >= 0.9), self.allowed_ids[other], masked)
        return self._nats(network, x0, replace(x0, tokens=replaced), selected).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """The cross-entropy at the selected positions over the rate; all of them are masked."""
        selected = x0.editable & (noise.per_position(x0, Purpose.CORRUPT) < self.rate)
        return self._nats(network, x0, replace(x0, tokens=x0.tokens.masked_fill(selected, self.mask_id)), selected)

    def _nats(self, network: Network, x0: Batch, x: Batch, selected: Tensor) -> PerPosition:
        log_f = network(x.tokens, x.attend, x.constant_times(self.rate), selected)
        return nats_of(log_f, x0.tokens, selected) / self.rate
