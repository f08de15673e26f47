"""Ghazvininejad et al. 2019, "Mask-Predict", section 2.2: conditional masked language modelling (CMLM).

    k ~ uniform on 1 … n,  k of the n positions masked, all sets equally likely
    loss(x0) = 2n/(n + 1) · Σ_{masked i} -log f(x0_i | unmasked)

As in the paper every masked position has the same weight, whatever k: it sums over the masked positions and divides by
their number in the batch, (n + 1)/2 per sequence on average; here by that average, so that parts of a batch add up and
a uniform network pays log V for each of n tokens. It differs from the order-agnostic bound (Hoogeboom et al. 2022,
`OrderAgnostic`) by the weight alone, 2n/(n + 1) instead of n/k, and so puts more weight on sequences with many masks.

The authors' code never masks all positions of a longer sequence (its k ends at n - 1), although decoding starts there,
and smooths labels; here it is as in the paper, without smoothing.

The paper claims no likelihood. With c_k the mean cost of a masked token when k are masked, this is Σ_k 2k/(n + 1)·c_k
and the bound Σ_k c_k. Averaged over a language the c_k of the best network do not fall with k, so this lies above the
bound (and so above the entropy); but for a single sequence it may lie below -log p(x0), even for a perfect network. So
it is none, and the order-agnostic bound of the same network is the figure to compare. The paper's length prediction is
left out, since lengths are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence
from diffusionbert.diffusion.tokens import TokenStatistics, nats_of
from diffusionbert.networks.base import Network
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.objectives.base import Likelihood, Objective, ObjectiveConfig, ScoringQuantities
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC
from diffusionbert.registry import register
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.mask_predict import MaskPredict


@register("cmlm")
@dataclass(frozen=True)
class CMLMConfig(ObjectiveConfig):
    """CMLM: any number of positions is masked in training, and mask-predict generates."""

    def build(self, statistics: TokenStatistics) -> CMLM:
        return CMLM(statistics.mask_id)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ORDER_AGNOSTIC,))

    def default_sampler(self) -> Sampler:
        return MaskPredict()


class CMLM(Objective[Network]):
    """Cross-entropy at a uniformly drawn number of masked positions, all with the same weight; t is the share k/n."""

    def __init__(self, mask_id: int):
        super().__init__()
        self.mask_id = mask_id

    @property
    def likelihood(self) -> Likelihood:
        """Pseudo: the weights are not those of any order of generation."""
        return Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        """2n/(n + 1) times the cross-entropy at k masked positions; k and the positions are drawn."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """2n/(n + 1) times the cross-entropy at k masked positions; k and the positions are drawn."""
        length = x0.editable.sum(dim=1)
        num_masked = 1 + (noise.stratified_uniform(x0) * length).long()
        masked = noise.chosen(x0, num_masked)
        log_f = network(x0.tokens.masked_fill(masked, self.mask_id), x0.attend, x0.fraction_of(masked), masked)
        weight = 2 * length.double() / (length + 1)
        return weight[:, None] * nats_of(log_f, x0.tokens, masked)
