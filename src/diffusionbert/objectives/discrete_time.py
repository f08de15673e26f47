"""Austin et al. 2021, "Structured denoising diffusion models in discrete state-spaces" (D3PM), eq. 1 and 5,
and He et al. 2022, "DiffusionBERT", which is the same objective on a pretrained network.

    nats(x0) = Σ over the grid's steps (s, t) of E_q(x_t | x0) [ KL(q(x_s | x_t, x0) ‖ p(x_s | x_t)) ]

The prior term is 0, because every schedule ends at 0. One step is drawn per sequence and weighted by T.

Where the original code differs: DiffusionBERT draws one t for a whole batch, and its spindle gives the reverse step the
frequency of the true token (`Quantity.PAPER`). D3PM's hybrid loss adds the cross-entropy to the divergence of the drawn
step, not to the sum over all steps as in its eq. 5; so do we.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule, uniform_grid
from diffusionbert.diffusion.shapes import Batch, Grid, PerPosition, PerSequence, Times, Tokens
from diffusionbert.diffusion.time_sampling import Early, TimeSampling, UniformTimes
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.networks.base import Network, predict
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    GRID,
    Draw,
    Estimator,
    GridObjective,
    Likelihood,
    LikelihoodDefinition,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
    TimeGrid,
    require_num_steps,
)
from diffusionbert.objectives.continuous_time import ContinuousTimeConfig
from diffusionbert.objectives.order_agnostic import ORDER_AGNOSTIC, OrderAgnosticGrid
from diffusionbert.registry import register
from diffusionbert.storage.schema import Component


class Quantity(Enum):
    """What is summed over the steps."""

    STRICT = "strict"  # the divergence: a bound on -log p(x0)
    PAPER = "paper"
    """r_{s|t}(x0)·cross-entropy, the paper's. Under a token-dependent schedule this is *not* a bound: the reverse
    process is given the rarity of the masked token."""


@register("discrete-time")
@dataclass(frozen=True)
class DiscreteTimeConfig(ObjectiveConfig):
    """D3PM and DiffusionBERT: the T-step bound."""

    schedule: NoiseSchedule = Linear()
    num_steps: int = 128
    """T."""
    quantity: Quantity = Quantity.STRICT
    hybrid: float = 0.0
    """The weight of D3PM's auxiliary cross-entropy in the loss."""
    time_sampling: TimeSampling = UniformTimes()
    uniform_noise: bool = False
    """Tokens turn into other tokens instead of `[MASK]`."""
    complementary: bool = False
    """Train on each sequence twice, at t and at 1 - t with the complementary mask (`Draw.antithetic`)."""

    takes_time = True

    def __post_init__(self) -> None:
        if not 0 <= self.hybrid < math.inf:
            raise ValueError(
                f"`hybrid`, the weight of the auxiliary cross-entropy, must be 0 or more, got "
                f"{self.hybrid}; 0.01 is usual"
            )
        require_num_steps(self.num_steps)

    def build(self, statistics: TokenStatistics) -> DiscreteTime:
        grid = uniform_grid(self.num_steps)
        process, complementary = self.process(statistics), self.complementary
        return DiscreteTime(process, grid, self.quantity, self.hybrid, self.time_sampling, complementary=complementary)

    def process(self, statistics: TokenStatistics) -> Process:
        """Absorbing or uniform noise; the paper's quantity uses f as p(v | x_t, t), without reweighting."""
        if self.uniform_noise:
            return Uniform(self.schedule, statistics.allowed)
        is_strict = self.quantity is Quantity.STRICT
        return Absorbing(self.schedule, statistics.mask_id, statistics.information, reweighted=is_strict)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        definition = LikelihoodDefinition(
            self.quantity.value if self.schedule.by_token else Quantity.STRICT.value,
            TimeGrid(self.num_steps),
            Estimator.STRATIFIED_TIMES,
            Component.of(self.schedule),
        )
        own = ScoringQuantity(GRID, definition, self.build)
        if self.uniform_noise:
            return ScoringQuantities((own,), ("the continuous-time bound exists for [MASK] noise only",))
        if time is TimeEmbedding.NONE and not self.schedule.by_token:
            definition = replace(definition, estimator=Estimator.ORDER_AGNOSTIC)
            return ScoringQuantities((ORDER_AGNOSTIC, ScoringQuantity(GRID, definition, self._order_agnostic_grid)))
        if self.quantity is Quantity.PAPER and self.schedule.by_token:
            return ScoringQuantities(
                (own,), ("no bound: the model was trained with the paper's quantity, which is not one",)
            )
        return ScoringQuantities((own, *ContinuousTimeConfig(self.schedule).scoring_quantities(time).available))

    def _order_agnostic_grid(self, statistics: TokenStatistics) -> OrderAgnosticGrid:
        return OrderAgnosticGrid(self.schedule, uniform_grid(self.num_steps), statistics.mask_id)

    @property
    def generates_on_masks(self) -> bool:  # type: ignore[override]
        return not self.uniform_noise

    @property
    def schedule_label(self) -> str:
        if self.uniform_noise:
            return f"{self.schedule}, uniform noise"
        return f"{self.schedule}, {self.quantity.value}" if self.schedule.by_token else str(self.schedule)


class DiscreteTime(GridObjective[Network]):
    """The T-step bound, for any process on tokens."""

    def __init__(
        self,
        process: Process,
        grid: Grid,
        quantity: Quantity = Quantity.STRICT,
        hybrid: float = 0.0,
        time_sampling: TimeSampling | None = None,
        *,
        complementary: bool = False,
    ):
        """`grid` rises from 0 to 1; `hybrid`, `time_sampling` and `complementary` only affect `loss`."""
        super().__init__(grid)
        if quantity is Quantity.STRICT:
            process.require_finite_divergence()
        elif not isinstance(process, Absorbing):
            raise ValueError("the paper's quantity is defined for absorbing noise only; use Quantity.STRICT")
        elif process.schedule.by_token and process.reweighted:
            raise ValueError(
                "the paper's quantity trains f to be p(v | x_t, t) itself, which a reweighted process would reweight "
                "again; use Absorbing(…, reweighted=False)"
            )
        self.process = process
        self.quantity = quantity
        is_bound = quantity is Quantity.STRICT or not process.schedule.by_token
        self.likelihood = Likelihood.BOUND if is_bound else Likelihood.PSEUDO
        self.is_capturable = isinstance(process, Absorbing) and process.learned is None
        self.hybrid = hybrid
        self.time_sampling = time_sampling or UniformTimes()
        self.complementary = complementary

    def draw(self, x0: Batch, noise: Noise) -> Draw:
        def draw(noise: Noise) -> Draw:
            return self._draw(x0, noise, self.time_sampling)

        return Draw.antithetic(self.process, draw, noise) if self.complementary else draw(noise)

    def loss_of(self, network: Network, x0: Batch, drawn: Draw) -> PerSequence:
        return drawn.summed(self._nats(network, drawn.clean(x0), drawn, self.hybrid), x0)

    def compile_training(self, backend: str | Callable[..., Any] = "inductor") -> None:
        if isinstance(self.process, Absorbing):
            self.process.compile_training(backend)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        """The bound at one drawn step, early ones more often: there, few tokens are masked, each with a high weight."""
        return self._nats(network, x0.tokens, self._draw(x0, noise, Early()), hybrid=0.0)

    def step_nats(
        self, network: Network, x0: Tokens, x_t: Batch, s: Times, t: Times, hybrid: float = 0.0
    ) -> PerPosition:
        """The term of step (s, t) for a given x_t."""
        return self._step_nats(network, x0, Draw.of(self.process, x_t, s, t), hybrid)

    def _step_nats(self, network: Network, x0: Tokens, drawn: Draw, hybrid: float) -> PerPosition:
        x_t, targets, s, t = drawn.x_t, drawn.targets, drawn.s, drawn.t
        prediction = predict(network, x_t, t, targets)
        if self.quantity is Quantity.STRICT:
            nats = self.process.divergence(x0, x_t, prediction, s, t, targets, hybrid)
        else:
            assert isinstance(self.process, Absorbing)
            r = self.process.unmask_probability(x0, x_t, s, t, targets)
            nats = -r * prediction.log_prob(targets.take(x0))
            if hybrid:
                nats = nats - hybrid * self.process.log_clean(x0, x_t, prediction, t, targets)
        return targets.scatter(nats)

    def _draw(self, x0: Batch, noise: Noise, time_sampling: TimeSampling) -> Draw:
        num_steps = len(self.grid) - 1
        time, weight = time_sampling.times(noise.stratified_uniform(x0))
        index = (time * num_steps).long()
        s, t = self.grid[index], self.grid[index + 1]
        return Draw.of(self.process, self.process.corrupt(x0, t, noise), s, t, weight * num_steps)

    def _nats(self, network: Network, x0: Tokens, drawn: Draw, hybrid: float) -> PerPosition:
        return drawn.weight[:, None] * self._step_nats(network, x0, drawn, hybrid)
