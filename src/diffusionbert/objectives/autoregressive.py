"""Radford et al. 2019, "Language models are unsupervised multitask learners" (GPT-2), eq. 1; Vaswani et al. 2017.

    nats(x0) = Σ_{editable i} -log p(x0_i | x0_1 … x0_{i-1})

All terms come from one pass of a decoder, so this is -log p(x0) itself: no noise, no bound, no draws. The length is
given, as for all objectives here: distributions are normalized over allowed tokens, which do not include an end-of-text
token, so the probabilities of all sequences of one length sum to 1. Positions that are not editable, such as a prompt,
are read but cost nothing. GPT-2's training differs: it joins documents with `<|endoftext|>`, which is predicted, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, PerPosition, Targets
from diffusionbert.diffusion.tokens import DensePrediction, TokenStatistics
from diffusionbert.networks.causal import CausalModel, CausalNetwork
from diffusionbert.networks.time_conditioning import TimeEmbedding
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
    generates_on_masks = False
    sampler_aliases = (Exact,)

    def build(self, statistics: TokenStatistics) -> Autoregressive:
        return Autoregressive()

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        definition = LikelihoodDefinition("nll", estimator=Estimator.LEFT_TO_RIGHT)
        return ScoringQuantities((ScoringQuantity(EXACT, definition, self.build),))

    def process(self, statistics: TokenStatistics) -> None:
        return

    def make_network(self, backbone: PreTrainedModel, time: TimeEmbedding, statistics: TokenStatistics) -> nn.Module:
        return CausalModel(backbone, statistics.allowed)

    def default_sampler(self) -> Sampler:
        return LeftToRight()


class Autoregressive(Objective[CausalNetwork]):
    """The cross-entropy of each token given those before it."""

    likelihood = Likelihood.EXACT

    def nats(self, network: CausalNetwork, x0: Batch, noise: Noise) -> PerPosition:
        """-log p of each editable token given those before it; the noise is not used."""
        targets = Targets.of(x0.editable)
        if isinstance(network, CausalModel):
            prediction = network.predict_next(x0.tokens, x0.attention_mask, targets)
        else:
            prediction = DensePrediction(network(x0.tokens, x0.attention_mask, x0.editable))
        return targets.scatter(-prediction.log_prob(targets.take(x0.tokens)))
