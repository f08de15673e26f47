"""Shi et al. 2024, "Simplified and generalized masked diffusion for discrete data" (GenMD4), §6: the schedule of
every token is learned together with the network, ᾱ_t(v) = 1 - t^w(v).

    nats(x0) = ∫₀¹ E_q(x_t | x0) [ R(x_t) ] dt,    R the sum of `Absorbing.rate` over the masked positions

The noise itself depends on w, so part of its gradient does not pass through the integrand. As in the paper it is
estimated by REINFORCE with a leave-one-out baseline (Kool et al. 2019), from two independent draws x_t, x_t' at one
time:

    ∇E[R] = E[ ½∇(R + R') + ½(R - R')·∇(log q(x_t | x0) - log q(x_t' | x0)) ]

R and q are those of the whole sequence: the network's prediction at one position depends on the masks at others.

Where the original differs: there f is p(v | x_t, t) itself and the network is time-conditioned. Here the process
reweights a time-agnostic f to p(v | x_t, t), so that exponents and network can be right independently.
`LearnedExponents` keeps the exponents within their range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusionbert.diffusion.absorbing import Absorbing, LearnedExponents
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Power
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, Times, Tokens, per_position
from diffusionbert.diffusion.time_sampling import Early, TimeSampling
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.base import Network
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.objectives.base import (
    CONTINUOUS,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Objective,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
    TimeGrid,
)
from diffusionbert.registry import register
from diffusionbert.storage.schema import Component


@register("learned-schedule")
@dataclass(frozen=True)
class LearnedScheduleConfig(ObjectiveConfig):
    """GenMD4: the continuous-time bound, with an exponent of each token's schedule learned with the network."""

    learns_exponents = True

    def build(self, statistics: TokenStatistics) -> LearnedSchedule:
        return LearnedSchedule(self.process(statistics))

    def process(self, statistics: TokenStatistics) -> Absorbing:
        """Absorbing noise with the exponents learned so far; a new model starts from the linear schedule."""
        size = len(statistics.allowed)
        exponents = torch.ones(size) if statistics.exponents is None else statistics.exponents
        return Absorbing(Power(), statistics.mask_id, LearnedExponents(exponents))

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        definition = LikelihoodDefinition(
            time=TimeGrid(), estimator=Estimator.STRATIFIED_TIMES, schedule=Component("learned")
        )
        return ScoringQuantities((ScoringQuantity(CONTINUOUS, definition, self.build),))

    @property
    def schedule_label(self) -> str:
        return "learned"

    def time_label(self, time: TimeEmbedding) -> str:
        """Time-agnostic."""
        return time.abbreviation


class LearnedSchedule(Objective[Network]):
    """The continuous-time bound, and a loss whose gradient is the bound's for the network and for the exponents."""

    def __init__(self, process: Absorbing, time_sampling: TimeSampling | None = None):
        """`loss` draws its times from `time_sampling`; by default from `Early`, since exponents may fall below 1."""
        super().__init__()
        if process.learned is None:
            raise ValueError(
                f"{process.schedule} has nothing to learn; use Absorbing(Power(), mask_id, LearnedExponents(…)), "
                "or ContinuousTime for a fixed schedule"
            )
        process.require_finite_rate()
        self.process = process
        self.time_sampling = time_sampling or Early()

    @property
    def likelihood(self) -> Likelihood:
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        """The integrand of the bound at one drawn time, the mean of two draws of x_t."""
        t, weight = self.time_sampling.times(noise.stratified_uniform(x0))
        first, second = (self.process.corrupt(x0, t, noise, purpose) for purpose in (Purpose.CORRUPT, Purpose.PAIR))
        return weight * self.paired_nats(network, x0.tokens, first, second, t)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """The integrand of the bound at one drawn time; exponents get no gradient from it."""
        process = self.process.fixed()
        t, weight = Early().times(noise.stratified_uniform(x0))
        return weight[:, None] * _rate_nats(process, network, x0.tokens, process.corrupt(x0, t, noise), t)

    def paired_nats(self, network: Network, x0: Tokens, first: Batch, second: Batch, t: Times) -> PerSequence:
        """The mean integrand of two draws; over both, its gradient is on average the gradient of the mean."""
        rate, other_rate = (_rate_nats(self.process, network, x0, x_t, t).sum(dim=1) for x_t in (first, second))
        score = self.process.log_corrupt(x0, first, t) - self.process.log_corrupt(x0, second, t)
        reinforce = (rate - other_rate).detach() * score
        return (rate + other_rate + reinforce - reinforce.detach()) / 2


def _rate_nats(process: Absorbing, network: Network, x0: Tokens, x_t: Batch, t: Times) -> PerPosition:
    targets = process.targets(x_t)
    log_f = network(x_t.tokens, x_t.attend, t, targets)
    return per_position(process.rate(x0, x_t, log_f, t), targets)
