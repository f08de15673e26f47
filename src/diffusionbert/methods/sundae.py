"""Savinov et al. 2022, "Step-unrolled denoising autoencoders for text generation" (SUNDAE), section 2.1.

    α ~ uniform on (0, 1) a row;  x_0: each editable word of x0 replaced with probability α by a uniform one
    x_u ~ f(· | x_{u-1}) at all editable places, each on its own, without gradient
    loss(x0) = 1/U · Σ_{u=0..U-1} Σ_{editable i} -log f(x0_i | x_u)

The network learns to mend its own first guesses and not only the noise: U = 2 in the paper. All editable places are
paid for, since nobody says which of them are wrong. Likelihood: none, nor a bound on one; the sampler is a Markov chain
whose law after some steps is not to be had, and the loss tells only how well one step mends. Judge it by its samples.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diffusionbert.categorical import draw, nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Uniform
from diffusionbert.schedules import Linear
from diffusionbert.shapes import AskedLogProbs, AskedTokens, Batch, PerAsked, PerPlace, RowValues, TokenSet

_PLACES_AT_ONCE = 1024


class StepUnrolled(Objective[Network]):
    """Cross-entropy to the clean text after noise, and again after the network's own corrections.

    A network that wants a time is always told 1: when writing, nobody knows what share is wrong.
    """

    def __init__(self, writable: TokenSet, unrolls: int = 2):
        super().__init__()
        if unrolls < 1:
            raise ValueError(f"the network is asked at least once, given {unrolls} unrolls; the paper's number is 2")
        self.unrolls = unrolls
        self.process = Uniform(Linear(), writable)  # by time α, a share α of the words is replaced

    @property
    def likelihood(self) -> Likelihood:
        """None: judge it by its samples."""
        return Likelihood.NONE

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The mean over unrolls of the cross-entropy at all editable places."""
        # By place first, so that a row's numbers do not depend on how far it is padded.
        uniform = noise.uniform(x0.example, Purpose.UNROLL, x0.tokens.shape[1], self.unrolls - 1)
        x = self.process.corrupt(x0, noise.position(x0), noise)
        total, log_f = _mended(network, x0, x)
        for number in range(self.unrolls - 1):
            words = _drawn(log_f.detach(), uniform[..., number][x0.editable])
            x = replace(x0, tokens=x0.tokens.masked_scatter(x0.editable, words))
            cost, log_f = _mended(network, x0, x)
            total = total + cost
        return total / self.unrolls

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """Refuses: there are none."""
        raise ValueError(
            "StepUnrolled (SUNDAE) has no likelihood, nor a bound on one: what its chain writes after some steps has "
            "no known probability; judge it by its samples"
        )


def _mended(network: Network, x0: Batch, x: Batch) -> tuple[RowValues, AskedLogProbs]:
    """What the clean text costs each row when x is seen, and the whole answer."""
    log_f = network(x.tokens, x.attend, x.row_times(1.0), x0.editable)
    return nats_of(log_f, x0.tokens, x0.editable).sum(dim=1), log_f


def _drawn(log_f: AskedLogProbs, uniform: PerAsked) -> AskedTokens:
    """One word for each place; in pieces, since a draw holds a few copies of its piece in float64."""
    num_pieces = 1 + len(log_f) // _PLACES_AT_ONCE
    pieces = zip(log_f.chunk(num_pieces), uniform.chunk(num_pieces), strict=True)
    return torch.cat([draw(log_p, numbers) for log_p, numbers in pieces])
