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

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, TokenSet
from diffusionbert.diffusion.tokens import TokenStatistics, nats_of
from diffusionbert.networks.base import Network
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.objectives.base import (
    PSEUDO,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Objective,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
)
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC
from diffusionbert.registry import register
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.gibbs import Gibbs


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


# ---- BERT-Mouth -----------------------------------------------------------------------------------------------------
#
# Wang & Cho 2019, "BERT has a mouth, and it must speak", section 2: masked language modelling as a generator.
#
#     nats(x0) = Σ_{i=1..n} -log f(x0_i | all other tokens)      the pseudo-log-likelihood (Besag 1975), n calls in all
#
# Each token is predicted with all others unmasked, so a sequence costs as if every token but one were known. This is
# not a distribution over sequences: the n conditionals of a network need not be consistent with any joint
# distribution, and where they are, their product is not that joint. The authors first took it for the potential of a
# Markov random field and have retracted that ("BERT has a mouth and must speak, but it is not an MRF", a note by Cho,
# 28 May 2019). It may lie below the entropy, and Σ exp(-nats) over all sequences may exceed 1. The figure of the same
# network that is comparable with other models is the order-agnostic bound (Hoogeboom et al. 2022).
#
# The training objective is a parameter; the paper's is that of BERT itself.


@register("bert-mouth")
@dataclass(frozen=True)
class BertMouthConfig(ObjectiveConfig):
    """BERT-Mouth: masked language modelling, sampled by Gibbs sampling."""

    rate: float = 0.15
    """The share of positions that are masked in training."""

    def build(self, statistics: TokenStatistics) -> BertMouth:
        training = MaskedLM(statistics.mask_id, statistics.allowed, self.rate)
        return BertMouth(training, statistics.mask_id)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        """The continuous-time bound, and the paper's pseudo-likelihood."""
        definition = LikelihoodDefinition("pseudo-likelihood", estimator=Estimator.LEAVE_ONE_OUT)
        return ScoringQuantities((ORDER_AGNOSTIC, ScoringQuantity(PSEUDO, definition, self.build)))

    def default_sampler(self) -> Sampler:
        return Gibbs()


class BertMouth(Objective[Network]):
    """Trains by another objective and scores by the pseudo-log-likelihood.

    A time-conditioned network is given the masked share, 1/n.
    """

    def __init__(self, training: Objective[Network], mask_id: int):
        super().__init__()
        self.training_objective = training
        self.mask_id = mask_id

    @property
    def likelihood(self) -> Likelihood:
        """Pseudo: every token is predicted with all others unmasked."""
        return Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        return self.training_objective.loss(network, x0, noise)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """n times the cross-entropy of one masked position; n strata visit each position once."""
        length = x0.editable.sum(dim=1)
        index = (noise.stratified_uniform(x0) * length).long()
        targets = x0.editable & (x0.editable.cumsum(dim=1) == 1 + index[:, None])
        log_f = network(x0.tokens.masked_fill(targets, self.mask_id), x0.attend, x0.fraction_of(targets), targets)
        return length[:, None] * nats_of(log_f, x0.tokens, targets)
