"""Radford et al. 2019, "Language models are unsupervised multitask learners" (GPT-2), eq. 1; Vaswani et al. 2017.

    nats(x0) = Σ_{editable i} -log p(x0_i | x0_1 … x0_{i-1})

All terms come from one pass of a decoder, so this is -log p(x0) itself: no noise, no bound, no draws.

The length is given, as for all objectives here, but differently. A masked model sees how many positions there are. A
decoder does not: nothing tells it where the end is. But it does not pay for the end either. Its distributions are
normalised over allowed tokens, which do not include an end of text, so the probabilities of all sequences of one length
sum to 1. Positions that are not editable, such as a prompt or a source, are read and cost nothing; what is not editable
after an editable position is not seen there.

GPT-2's training differs: documents are joined by `<|endoftext|>` and cut into blocks of 1024 tokens, so tokens are seen
across document borders, and the end of a text is predicted and paid for like a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, TokenSet
from diffusionbert.diffusion.tokens import TokenStatistics, nats_of
from diffusionbert.networks.causal import CausalModel, CausalNetwork
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.objectives.base import (
    EXACT,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Objective,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
)
from diffusionbert.registry import register
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.exact import Exact
from diffusionbert.samplers.left_to_right import LeftToRight


@register("autoregressive")
@dataclass(frozen=True)
class AutoregressiveConfig(ObjectiveConfig):
    """A decoder: one token after another, from left to right."""

    is_causal = True
    sampler_aliases = (Exact,)

    def build(self, statistics: TokenStatistics) -> Autoregressive:
        return Autoregressive()

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        definition = LikelihoodDefinition("nll", estimator=Estimator.LEFT_TO_RIGHT)
        return ScoringQuantities((ScoringQuantity(EXACT, definition, self.build),))

    def process(self, statistics: TokenStatistics) -> None:
        return

    def make_network(self, backbone: PreTrainedModel, time: TimeEmbedding, allowed: TokenSet) -> nn.Module:
        return CausalModel(backbone, allowed)

    def default_sampler(self) -> Sampler:
        return LeftToRight()

    @property
    def generates_on_masks(self) -> bool:
        """No: positions to the right are not seen."""
        return False


@final
class Autoregressive(Objective[CausalNetwork]):
    """The cross-entropy of each token given those before it."""

    @property
    def likelihood(self) -> Likelihood:
        return Likelihood.EXACT

    def loss(self, network: CausalNetwork, x0: Batch, noise: Noise) -> PerSequence:
        """The NLL itself."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: CausalNetwork, x0: Batch, noise: Noise) -> PerPosition:
        """-log p of each editable token given those before it; the noise is not used."""
        log_p = network(x0.tokens, x0.attend, x0.editable)
        return nats_of(log_p, x0.tokens, x0.editable)
