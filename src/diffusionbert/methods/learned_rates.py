"""Shi et al. 2024, "Simplified and generalized masked diffusion for discrete data" (GenMD4), §6: every token's rate of
hiding is learned together with the network, ᾱ_t(v) = 1 - t^w(v).

    nats(x0) = ∫₀¹ E_q(x_t | x0) [ R(x_t) ] dt,    R the sum of `Absorbing.rate` over the row's hidden places

The noise itself depends on w, so its gradient has a part that no path leads through. As in the paper it is estimated by
REINFORCE with a leave-one-out baseline (Kool et al. 2019), from two independent draws x_t, x_t' at one time:

    ∇E[R] = E[ ½∇(R + R') + ½(R - R')·∇(log q(x_t | x0) - log q(x_t' | x0)) ]

R and q are those of the whole row: what the network says at one place depends on what is hidden at others.

Where the original departs: there f is p(v | x_t, t) itself and the network is told the time. Here the process makes
p(v | x_t, t) of a time-agnostic f by its reweighting, so that exponents and network can be right independently.
This module does not know how exponents are kept within their range; see `LearnedExponents`.
"""

from __future__ import annotations

from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.proposals import Early, TimeProposal
from diffusionbert.shapes import Batch, PerPlace, RowTimes, RowValues, Tokens, per_place


class LearnedRates(Objective[Network]):
    """The bound in continuous time, and a loss whose gradient is the bound's for the network and for the exponents."""

    def __init__(self, process: Absorbing, proposal: TimeProposal | None = None):
        """From `proposal`, `loss` draws its times; unless given, from `Early`, since exponents may fall below 1."""
        super().__init__()
        if process.learned is None:
            raise ValueError(
                f"{process.schedule} has nothing to learn; use Absorbing(Power(), mask_id, LearnedExponents(…)), "
                "or ContinuousTime for a fixed schedule"
            )
        process.require_finite_rate()
        self.process = process
        self.proposal = proposal or Early()

    @property
    def likelihood(self) -> Likelihood:
        """A bound."""
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The bound's integrand at one drawn time, the mean of two draws of x_t."""
        t, weight = self.proposal.times(noise.position(x0))
        first, second = (self.process.corrupt(x0, t, noise, purpose) for purpose in (Purpose.CORRUPT, Purpose.PAIR))
        return weight * self.paired_nats(network, x0.tokens, first, second, t)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """The bound's integrand at one drawn time; exponents get no gradient from it."""
        process = self.process.fixed()
        t, weight = Early().times(noise.position(x0))
        return weight[:, None] * _rate_nats(process, network, x0.tokens, process.corrupt(x0, t, noise), t)

    def paired_nats(self, network: Network, x0: Tokens, first: Batch, second: Batch, t: RowTimes) -> RowValues:
        """The mean integrand of two draws; over both, its gradient is on average the gradient of the mean."""
        rate, other_rate = (_rate_nats(self.process, network, x0, x_t, t).sum(dim=1) for x_t in (first, second))
        score = self.process.log_corrupt(x0, first, t) - self.process.log_corrupt(x0, second, t)
        reinforce = (rate - other_rate).detach() * score
        return (rate + other_rate + reinforce - reinforce.detach()) / 2


def _rate_nats(process: Absorbing, network: Network, x0: Tokens, x_t: Batch, t: RowTimes) -> PerPlace:
    asked = process.asked(x_t)
    log_f = network(x_t.tokens, x_t.attend, t, asked)
    return per_place(process.rate(x0, x_t, log_f, t), asked)
