"""First-hitting sampling (Zheng et al. 2024, "Masked diffusion models are secretly time-agnostic masked models").

Where a schedule treats all tokens alike, the interval (s, t) of the time grid in which a position is unmasked does not
depend on the tokens:

    P(unmasked in (s, t)) = (ᾱ_s - ᾱ_t) / (1 - ᾱ_start)      independently for each position
    token ~ f(v | x_t, t)                                     warped, when its interval comes

So the intervals are drawn first, and the network is called at those times only, with each sequence's own t: at most
min(L, T) calls per sequence. Texts are distributed exactly as by `Ancestral` over the same time grid, for every
network. A finer grid costs nothing: continuous time is `steps=1_000_000`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, PerPosition, PositionMask, TargetLogProbs
from diffusionbert.diffusion.tokens import draw
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State


@dataclass(frozen=True, eq=False, kw_only=True)
class FirstHittingState(State):
    """Which positions are masked, and the interval in which each is unmasked."""

    grid: Grid
    masked: PositionMask
    interval: Tensor  # [B, L]: the k of the interval (grid[k], grid[k + 1])
    uniform: PerPosition  # one number per position, which draws its token

    @property
    def latest(self) -> Counts:
        """The interval of each sequence in which its next position is unmasked; -1 if none is left."""
        return torch.where(self.masked, self.interval, -1).amax(dim=1)

    @property
    def due(self) -> PositionMask:
        """The positions that are unmasked in that interval."""
        return self.masked & (self.interval == self.latest[:, None])


@register("first-hitting")
@dataclass(frozen=True)
class FirstHitting(Sampler):
    """Draws when each position is unmasked, then calls the network at those times only.

    With each update every unfinished sequence moves on to its own next time.
    """

    def resolve(self, context: SamplingContext) -> FirstHitting:
        schedule = context.absorbing(self).schedule
        if schedule.by_token:
            raise ValueError(
                f"the sampler 'first-hitting' draws unmasking times first, but under {schedule} they depend on the "
                "token; use 'skip-exact' with a time-agnostic network, 'ancestral' with any other"
            )
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> FirstHittingState:
        process, noise = context.absorbing(self), Noise(seed)
        grid = context.grid.to(canvas.tokens.device)
        x = process.prior(canvas, noise)
        masked = process.targets(x)
        time = torch.where(masked.any(dim=1), grid[-1], 0.0)
        interval = _intervals(process, grid, noise.per_position(x, Purpose.UNMASK))
        own = {"grid": grid, "masked": masked, "interval": interval, "uniform": noise.per_position(x, Purpose.SAMPLE)}
        return FirstHittingState.begin(context, canvas, seed, x.tokens, time, **own)

    def query(self, state: FirstHittingState) -> Query | None:
        """The positions that are due, each sequence at its own time."""
        return Query.of(state.x, state.grid[state.latest + 1], state.due)

    def update(self, state: FirstHittingState, answer: TargetLogProbs) -> FirstHittingState:
        due = state.due
        tokens = draw(state.context.warper(answer), state.uniform[due])
        masked = state.masked & ~due
        unfinished = masked.any(dim=1)
        tokens = state.tokens.masked_scatter(due, tokens)
        time = torch.where(unfinished, state.grid[state.latest], 0.0)
        return state.advance(tokens, time, state.masked.any(dim=1), not bool(unfinished.any()), masked=masked)


def _intervals(process: Absorbing, grid: Grid, uniform: PerPosition) -> Tensor:
    """For each position the k of the interval (grid[k], grid[k + 1]) in which it is unmasked."""
    masked = 1 - process.schedule.survival(grid, torch.ones_like(grid))
    interval = torch.searchsorted(masked, uniform * masked[-1], right=True) - 1
    # Where the grid ends so early that 1 - ᾱ rounds to 0, the first step unmasks.
    return interval.clamp(max=len(grid) - 2)
