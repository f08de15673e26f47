"""Sahoo et al. 2024, "Simple and effective masked diffusion language models" (MDLM), eq. 10, and
Shi et al. 2024, "Simplified and generalized masked diffusion" (MD4), generalised to token-dependent schedules.

    nats(x0) = ∫₀¹ E_q(x_t | x0) [ rate(x0, x_t, t) ] dt

the limit of the T-step bound for T → ∞. Under a schedule that treats all tokens alike the rate is
-ᾱ'/(1-ᾱ) · cross-entropy; for the general form see `Absorbing.rate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence, Times, Tokens, per_position
from diffusionbert.diffusion.time_sampling import Early, TimeSampling, UniformTimes
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
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC
from diffusionbert.registry import register
from diffusionbert.storage.schema import Component


@register("continuous-time")
@dataclass(frozen=True)
class ContinuousTimeConfig(ObjectiveConfig):
    """MDLM: the continuous-time bound."""

    schedule: NoiseSchedule = Linear()
    time_sampling: TimeSampling = UniformTimes()

    takes_time = True

    def build(self, statistics: TokenStatistics) -> ContinuousTime:
        return ContinuousTime(self.process(statistics), self.time_sampling)

    def process(self, statistics: TokenStatistics) -> Absorbing:
        return Absorbing(self.schedule, statistics.mask_id, statistics.information)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        """The continuous-time bound, by the estimator of least variance."""
        if time is TimeEmbedding.NONE and not self.schedule.by_token:
            return ScoringQuantities((ORDER_AGNOSTIC,))
        definition = LikelihoodDefinition(
            time=TimeGrid(), estimator=Estimator.STRATIFIED_TIMES, schedule=Component.of(self.schedule)
        )
        return ScoringQuantities((ScoringQuantity(CONTINUOUS, definition, self.build),))

    @property
    def schedule_label(self) -> str:
        return str(self.schedule)


class ContinuousTime(Objective[Network]):
    """The continuous-time bound under absorbing noise."""

    def __init__(self, process: Absorbing, time_sampling: TimeSampling | None = None):
        """`loss` draws its times from `time_sampling`."""
        super().__init__()
        process.require_finite_divergence()
        process.require_finite_rate()
        self.process = process
        self.time_sampling = time_sampling or UniformTimes()

    @property
    def likelihood(self) -> Likelihood:
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> PerSequence:
        """The integrand of the bound at one drawn time."""
        return self._estimate(network, x0, noise, self.time_sampling).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """The integrand of the bound at one drawn time."""
        return self._estimate(network, x0, noise, Early())

    def rate_nats(self, network: Network, x0: Tokens, x_t: Batch, t: Times) -> PerPosition:
        """The integrand at time t for a given x_t."""
        targets = self.process.targets(x_t)
        log_f = network(x_t.tokens, x_t.attend, t, targets)
        return per_position(self.process.rate(x0, x_t, log_f, t), targets)

    def _estimate(self, network: Network, x0: Batch, noise: Noise, time_sampling: TimeSampling) -> PerPosition:
        t, weight = time_sampling.times(noise.stratified_uniform(x0))
        return weight[:, None] * self.rate_nats(network, x0.tokens, self.process.corrupt(x0, t, noise), t)
