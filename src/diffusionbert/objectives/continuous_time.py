"""Sahoo et al. 2024, "Simple and effective masked diffusion language models" (MDLM), eq. 10, and
Shi et al. 2024, "Simplified and generalized masked diffusion" (MD4), generalized to token-dependent schedules.

    nats(x0) = ∫₀¹ E_q(x_t | x0) [ R(x_t) ] dt,    R the sum of `Absorbing.rate` over the masked positions

This is the limit of the T-step bound as T → ∞. Under a schedule that treats all tokens alike, the rate is
-ᾱ'/(1-ᾱ) · cross-entropy.

`LearnedSchedule` is GenMD4 (Shi et al. 2024, §6): the schedule of every token, ᾱ_t(v) = 1 - t^w(v), is learned together
with the network. The noise itself depends on w, so part of the gradient does not pass through the integrand. As in the
paper, that part is estimated by REINFORCE with a leave-one-out baseline (Kool et al. 2019), from two independent draws
x_t, x_t' at one time:

    ∇E[R] = E[ ½∇(R + R') + ½(R - R')·∇(log q(x_t | x0) - log q(x_t' | x0)) ]

R and q are those of the whole sequence: the network's prediction at one position depends on the masks at others.
Where the original differs: there, f is p(v | x_t, t) itself and the network is time-conditioned. Here, the process
reweights a time-agnostic f to p(v | x_t, t), so that exponents and network can be right independently of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusionbert.diffusion.absorbing import Absorbing, LearnedExponents
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule, Power
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, Times, Tokens
from diffusionbert.diffusion.time_sampling import Early, TimeSampling, UniformTimes
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.base import Network, predict
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    CONTINUOUS,
    Draw,
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Objective,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
    TimeGrid,
)
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC
from diffusionbert.registry import register
from diffusionbert.storage.schema import Component


@register("continuous-time")
@dataclass(frozen=True)
class ContinuousTimeConfig(ObjectiveConfig):
    """MDLM: the continuous-time bound."""

    schedule: NoiseSchedule = Linear()
    time_sampling: TimeSampling = UniformTimes()
    complementary: bool = False
    """Train on each sequence twice, at t and at 1 - t with the complementary mask (`Draw.antithetic`)."""

    takes_time = True

    def build(self, statistics: TokenStatistics) -> ContinuousTime:
        return ContinuousTime(self.process(statistics), self.time_sampling, complementary=self.complementary)

    def process(self, statistics: TokenStatistics) -> Absorbing:
        return Absorbing(self.schedule, statistics.mask_id, statistics.information)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        """The continuous-time bound, with the estimator of lowest variance."""
        if time is TimeEmbedding.NONE and not self.schedule.by_token:
            return ScoringQuantities((ORDER_AGNOSTIC,))
        return ScoringQuantities((ScoringQuantity(CONTINUOUS, _definition(Component.of(self.schedule)), self.build),))


@register("learned-schedule")
@dataclass(frozen=True)
class LearnedScheduleConfig(ObjectiveConfig):
    """GenMD4: the continuous-time bound, with the exponent of each token's schedule learned with the network."""

    learns_exponents = True

    def build(self, statistics: TokenStatistics) -> LearnedSchedule:
        return LearnedSchedule(self.process(statistics))

    def process(self, statistics: TokenStatistics) -> Absorbing:
        """Absorbing noise with the exponents learned so far; a new model starts from the linear schedule."""
        size = len(statistics.allowed)
        exponents = torch.ones(size) if statistics.exponents is None else statistics.exponents
        return Absorbing(Power(), statistics.mask_id, LearnedExponents(exponents))

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        return ScoringQuantities((ScoringQuantity(CONTINUOUS, _definition(Component("learned")), self.build),))

    @property
    def schedule_label(self) -> str:
        return "learned"

    def time_label(self, time: TimeEmbedding) -> str:
        return time.abbreviation


def _definition(schedule: Component) -> LikelihoodDefinition:
    return LikelihoodDefinition(time=TimeGrid(), estimator=Estimator.STRATIFIED_TIMES, schedule=schedule)


class ContinuousTime(Objective[Network]):
    """The continuous-time bound under absorbing noise; `loss` draws its times from `time_sampling`."""

    likelihood = Likelihood.BOUND

    def __init__(self, process: Absorbing, time_sampling: TimeSampling | None = None, *, complementary: bool = False):
        super().__init__()
        process.require_finite_divergence()
        process.require_finite_rate()
        self.process = process
        self.is_capturable = process.learned is None
        self.time_sampling = time_sampling or UniformTimes()
        self.complementary = complementary

    def draw(self, x0: Batch, noise: Noise) -> Draw:
        def draw(noise: Noise) -> Draw:
            return _draw(self.process, x0, noise, self.time_sampling)

        return Draw.antithetic(self.process, draw, noise) if self.complementary else draw(noise)

    def loss_of(self, network: Network, x0: Batch, drawn: Draw) -> PerSequence:
        return drawn.summed(_nats(self.process, network, drawn.clean(x0), drawn), x0)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        return _nats(self.process, network, x0.tokens, _draw(self.process, x0, noise, Early()))


class LearnedSchedule(Objective[Network]):
    """The continuous-time bound, and a loss whose gradient is the bound's for the network and for the exponents."""

    likelihood = Likelihood.BOUND

    def __init__(self, process: Absorbing):
        super().__init__()
        if process.learned is None:
            raise ValueError(
                f"{process.schedule} has nothing to learn; use Absorbing(Power(), mask_id, LearnedExponents(…)), "
                "or ContinuousTime for a fixed schedule"
            )
        process.require_finite_rate()
        self.process = process

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        """The mean integrand of two draws at one time, which is from `Early`, since exponents may fall below 1."""
        t, weight = Early().times(noise.stratified_uniform(x0))
        first, second = (self.process.corrupt(x0, t, noise, purpose) for purpose in (Purpose.CORRUPT, Purpose.PAIR))
        return weight * self.paired_nats(network, x0.tokens, first, second, t)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """The integrand at one drawn time; exponents get no gradient from it."""
        process = self.process.fixed()
        return _nats(process, network, x0.tokens, _draw(process, x0, noise, Early()))

    def paired_nats(self, network: Network, x0: Tokens, first: Batch, second: Batch, t: Times) -> PerSequence:
        """The mean integrand of two draws; the expectation of its gradient is the gradient of its expectation."""
        rate, other_rate = (rate_nats(self.process, network, x0, x_t, t).sum(dim=1) for x_t in (first, second))
        score = self.process.log_corrupt(x0, first, t) - self.process.log_corrupt(x0, second, t)
        reinforce = (rate - other_rate).detach() * score
        return (rate + other_rate + reinforce - reinforce.detach()) / 2


def rate_nats(process: Absorbing, network: Network, x0: Tokens, x_t: Batch, t: Times) -> PerPosition:
    """The integrand of the bound at time t for a given x_t."""
    return _rate_nats(process, network, x0, Draw.of(process, x_t, t, t))


def _rate_nats(process: Absorbing, network: Network, x0: Tokens, drawn: Draw) -> PerPosition:
    x_t, t, targets = drawn.x_t, drawn.t, drawn.targets
    return targets.scatter(process.rate(x0, x_t, predict(network, x_t, t, targets), t, targets))


def _draw(process: Absorbing, x0: Batch, noise: Noise, time_sampling: TimeSampling) -> Draw:
    """Draws a time, and x_t at that time; a step of continuous time has no length, so s = t."""
    t, weight = time_sampling.times(noise.stratified_uniform(x0))
    return Draw.of(process, process.corrupt(x0, t, noise), t, t, weight)


def _nats(process: Absorbing, network: Network, x0: Tokens, drawn: Draw) -> PerPosition:
    """The integrand at one drawn time."""
    return drawn.weight[:, None] * _rate_nats(process, network, x0, drawn)
