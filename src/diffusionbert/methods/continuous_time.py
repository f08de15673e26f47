"""Sahoo et al. 2024, "Simple and effective masked diffusion language models" (MDLM), eq. 10, and
Shi et al. 2024, "Simplified and generalized masked diffusion" (MD4), generalised to schedules by token.

    nats(x0) = ∫₀¹ E_q(x_t | x0) [ rate(x0, x_t, t) ] dt

the limit of the bound over ever finer grids. Under a schedule that treats all tokens alike the rate is
-ᾱ'/(1-ᾱ) · cross-entropy; for the general form see `Absorbing.rate`.
"""

from __future__ import annotations

from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.processes import Absorbing
from diffusionbert.proposals import Early, Even, TimeProposal
from diffusionbert.shapes import Batch, PerPlace, RowTimes, RowValues, Tokens, per_place


class ContinuousTime(Objective[Network]):
    """The bound in continuous time, for absorbing noise."""

    def __init__(self, process: Absorbing, proposal: TimeProposal | None = None):
        """From `proposal`, `loss` draws its times."""
        super().__init__()
        process.require_finite_divergence()
        process.require_finite_rate()
        self.process = process
        self.proposal = proposal or Even()

    @property
    def likelihood(self) -> Likelihood:
        """A bound."""
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The bound's integrand at one drawn time."""
        return self._estimate(network, x0, noise, self.proposal).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """The bound's integrand at one drawn time."""
        return self._estimate(network, x0, noise, Early())

    def rate_nats(self, network: Network, x0: Tokens, x_t: Batch, t: RowTimes) -> PerPlace:
        """The integrand at time t for a given x_t."""
        asked = self.process.asked(x_t)
        log_f = network(x_t.tokens, x_t.attend, t, asked)
        return per_place(self.process.rate(x0, x_t, log_f, t), asked)

    def _estimate(self, network: Network, x0: Batch, noise: Noise, proposal: TimeProposal) -> PerPlace:
        t, weight = proposal.times(noise.position(x0))
        return weight[:, None] * self.rate_nats(network, x0.tokens, self.process.corrupt(x0, t, noise), t)
