"""Savinov et al. 2022, "Step-unrolled denoising autoencoders for text generation" (SUNDAE), section 2.1.

    α ~ uniform on (0, 1) per sequence;  x_0: each editable token of x0 replaced with probability α by a uniform one
    x_u ~ f(· | x_{u-1}) at all editable positions, independently, without gradient
    loss(x0) = 1/U · Σ_{u=0..U-1} Σ_{editable i} -log f(x0_i | x_u)

The network learns to correct its own predictions, not just the noise: U = 2 in the paper. All editable positions count,
since it is not known which of them are wrong. There is no likelihood, nor a bound on one: the sampler is a Markov chain
whose distribution after some steps is intractable, and the loss measures only a single step of correction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, TokenSet
from diffusionbert.diffusion.tokens import TokenStatistics, draw, nats_of
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.networks.base import Network
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import NO_LIKELIHOOD, Likelihood, Objective, ObjectiveConfig, ScoringQuantities
from diffusionbert.registry import register
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.refinement import Refinement

_POSITIONS_AT_ONCE = 1024


@register("sundae")
@dataclass(frozen=True)
class SundaeConfig(ObjectiveConfig):
    """SUNDAE: learns to correct uniform noise and its own predictions."""

    unrolls: int = 2
    """How often the network is called in a training step; each time but the first, on its own predictions."""

    generates_on_masks = False

    def build(self, statistics: TokenStatistics) -> Sundae:
        return Sundae(statistics.allowed, self.unrolls)

    def process(self, statistics: TokenStatistics) -> None:
        return

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((), (NO_LIKELIHOOD,))

    def default_sampler(self) -> Sampler:
        return Refinement()


class Sundae(Objective[Network]):
    """Cross-entropy of the clean text after noise, and again after the network's own corrections.

    A time-conditioned network is always given 1: in sampling, the fraction of wrong tokens is unknown.
    """

    likelihood = Likelihood.NONE

    def __init__(self, allowed: TokenSet, unrolls: int = 2):
        super().__init__()
        if unrolls < 1:
            raise ValueError(f"`unrolls` must be 1 or more, got {unrolls}; the paper's number is 2")
        self.unrolls = unrolls
        self.process = Uniform(Linear(), allowed)  # at time α, a fraction α of the tokens is replaced

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        # By position first, so that the numbers of a sequence do not depend on its padding.
        uniform = noise.uniform(x0.example, Purpose.UNROLL, x0.tokens.shape[1], self.unrolls - 1)
        x = self.process.corrupt(x0, noise.stratified_uniform(x0), noise)
        total, log_f = _corrected(network, x0, x)
        for number in range(self.unrolls - 1):
            tokens = _sampled(log_f.detach(), uniform[..., number][x0.editable])
            x = replace(x0, tokens=x0.tokens.masked_scatter(x0.editable, tokens))
            cost, log_f = _corrected(network, x0, x)
            total = total + cost
        return total / self.unrolls

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        raise ValueError(
            "SUNDAE has no likelihood, nor a bound on one: the distribution of its Markov chain after some steps is "
            "intractable; judge it by its samples"
        )


def _corrected(network: Network, x0: Batch, x: Batch) -> tuple[Tensor, Tensor]:
    """The cross-entropy of the clean text given x, per sequence, and the network's log-probabilities."""
    log_f = network(x.tokens, x.attention_mask, x.constant_times(1.0), x0.editable)
    return nats_of(log_f, x0.tokens, x0.editable).sum(dim=1), log_f


def _sampled(log_f: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token per position; in pieces, since a draw needs a few float64 copies of its input."""
    num_pieces = 1 + len(log_f) // _POSITIONS_AT_ONCE
    pieces = zip(log_f.chunk(num_pieces), uniform.chunk(num_pieces), strict=True)
    return torch.cat([draw(log_p, numbers) for log_p, numbers in pieces])
