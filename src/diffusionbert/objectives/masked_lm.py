"""Masked language modeling: BERT's pretraining, BERT-Mouth and CMLM.

Devlin et al. 2019, "BERT", the ordinary pretraining that DiffusionBERT starts from (`MaskedLM`):

    loss(x0) = 1/rate · Σ over selected positions i of -log f(x0_i | x with the selected positions masked)

Each editable position is selected with probability `rate` (15 %); a selected token becomes `[MASK]` (80 %), another
token (10 %) or stays (10 %). The next-sentence loss of the original is left out, as in RoBERTa.

Wang & Cho 2019, "BERT has a mouth, and it must speak", section 2 (`BertMouth`):

    nats(x0) = Σ_{i=1..n} -log f(x0_i | all other tokens)      the pseudo-log-likelihood (Besag 1975), n calls in all

This is not a distribution over sequences, as Cho notes himself ("BERT has a mouth and must speak, but it is not an
MRF", 28 May 2019): it may lie below the entropy, and Σ exp(-nats) over all sequences may exceed 1. To compare the same
network with other models, use the order-agnostic bound.

Ghazvininejad et al. 2019, "Mask-Predict", section 2.2: conditional masked language modeling (`CMLM`):

    k ~ uniform on 1 … n,  k of the n positions masked, all sets equally likely
    loss(x0) = 2n/(n + 1) · Σ_{masked i} -log f(x0_i | unmasked)

Every masked position has the same weight whatever k is, whereas the order-agnostic bound uses n/k. The paper divides by
the number of masked positions in the batch; we divide by its expectation, so that the parts of a batch add up. The
authors' code never masks all positions of a longer sequence, and it smooths labels; we follow the paper, without its
length prediction. The paper claims no likelihood: averaged over a language, this lies above the bound for the best
network, but for a single sequence it may lie below -log p(x0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, PositionMask, TokenSet
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.base import Network, nats_at
from diffusionbert.networks.time_conditioning import TimeEmbedding
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
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC, masked_nats
from diffusionbert.registry import register
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.samplers.mask_predict import MaskPredict


@register("masked-lm")
@dataclass(frozen=True)
class MaskedLMConfig(ObjectiveConfig):
    """BERT: ordinary masked-language-model pretraining."""

    rate: float = 0.15
    """The fraction of positions that are masked."""

    is_pretraining = True

    def build(self, statistics: TokenStatistics) -> MaskedLM:
        return MaskedLM(statistics.mask_id, statistics.allowed, self.rate)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ORDER_AGNOSTIC,))


class MaskedLM(Objective[Network]):
    """Cross-entropy at a fixed fraction of positions; a time-conditioned network is always given the time `rate`."""

    likelihood = Likelihood.PSEUDO  # the cost of tokens when most others are unmasked
    is_capturable = True
    allowed_ids: Tensor

    def __init__(self, mask_id: int, allowed: TokenSet, rate: float = 0.15):
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(
                f"`rate`, the fraction of masked positions, must lie in (0, 1), got {rate}; BERT's is 0.15"
            )
        self.mask_id = mask_id
        self.rate = rate
        self.register_buffer("allowed_ids", allowed.nonzero()[:, 0], persistent=False)

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        """The cross-entropy at the selected positions, divided by the rate; some of them are kept or replaced."""
        selected = self._selected(x0, noise)
        outcome = noise.per_position(x0, Purpose.KEEP)
        other = (noise.per_position(x0, Purpose.REPLACE) * len(self.allowed_ids)).long()
        masked = x0.tokens.masked_fill(selected & (outcome < 0.8), self.mask_id)
        replaced = torch.where(selected & (outcome >= 0.9), self.allowed_ids[other], masked)
        nats = nats_at(network, replace(x0, tokens=replaced), x0.constant_times(self.rate), selected, x0.tokens)
        return (nats / self.rate).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """The cross-entropy at the selected positions, divided by the rate; all of them are masked."""
        selected = self._selected(x0, noise)
        return masked_nats(network, x0, selected, self.mask_id, x0.constant_times(self.rate)) / self.rate

    def _selected(self, x0: Batch, noise: Noise) -> PositionMask:
        return x0.editable & (noise.per_position(x0, Purpose.CORRUPT) < self.rate)


@register("bert-mouth")
@dataclass(frozen=True)
class BertMouthConfig(ObjectiveConfig):
    """BERT-Mouth: masked language modeling, with Gibbs sampling."""

    rate: float = 0.15
    """The fraction of positions that are masked in training."""

    def build(self, statistics: TokenStatistics) -> BertMouth:
        return BertMouth(MaskedLM(statistics.mask_id, statistics.allowed, self.rate), statistics.mask_id)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        """The continuous-time bound, and the paper's pseudo-likelihood."""
        definition = LikelihoodDefinition("pseudo-likelihood", estimator=Estimator.LEAVE_ONE_OUT)
        return ScoringQuantities((ORDER_AGNOSTIC, ScoringQuantity(PSEUDO, definition, self.build)))

    def default_sampler(self) -> Sampler:
        return Gibbs()


class BertMouth(Objective[Network]):
    """Trains with another objective (in the paper, BERT's) and scores by the pseudo-log-likelihood.

    A time-conditioned network is given the masked fraction, 1/n.
    """

    likelihood = Likelihood.PSEUDO

    def __init__(self, training: Objective[Network], mask_id: int):
        super().__init__()
        self.training_objective = training
        self.is_capturable = training.is_capturable
        self.mask_id = mask_id

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        return self.training_objective.loss(network, x0, noise)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """n times the cross-entropy of one masked position; n strata visit each position once."""
        length = x0.editable.sum(dim=1)
        index = (noise.stratified_uniform(x0) * length).long()
        targets = x0.editable & (x0.editable.cumsum(dim=1) == 1 + index[:, None])
        return length[:, None] * masked_nats(network, x0, targets, self.mask_id)


@register("cmlm")
@dataclass(frozen=True)
class CMLMConfig(ObjectiveConfig):
    """CMLM: trains with any number of masked positions, and generates by mask-predict."""

    def build(self, statistics: TokenStatistics) -> CMLM:
        return CMLM(statistics.mask_id)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ORDER_AGNOSTIC,))

    def default_sampler(self) -> Sampler:
        return MaskPredict()


class CMLM(Objective[Network]):
    """Cross-entropy at a uniformly drawn number k of masked positions, all with the same weight; t is k/n."""

    likelihood = Likelihood.PSEUDO  # the weights are not those of any order of generation
    is_capturable = True

    def __init__(self, mask_id: int):
        super().__init__()
        self.mask_id = mask_id

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """2n/(n + 1) times the cross-entropy at k masked positions; k and the positions are drawn."""
        length = x0.editable.sum(dim=1)
        masked = noise.chosen(x0, 1 + (noise.stratified_uniform(x0) * length).long())
        weight = 2 * length.double() / (length + 1)
        return weight[:, None] * masked_nats(network, x0, masked, self.mask_id)
