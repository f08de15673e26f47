"""Ancestral sampling (Ho et al. 2020, algorithm 2; Austin et al. 2021, D3PM).

    x_1 ~ prior,   x_s ~ p(x_s | x_t)  for every step (s, t) of the time grid, from the last to the first

It suits every process on tokens and every network. The network is called once per step while anything is masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PositionMask, TargetLogProbs, Times, Tokens
from diffusionbert.diffusion.tokens import draw
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State


@dataclass(frozen=True, eq=False, kw_only=True)
class GridState(State):
    """x_t at a time of the grid."""

    num_left: int  # the number of steps that are left

    @property
    def process(self) -> Process:
        assert isinstance(self.context.process, Process)
        return self.context.process

    @property
    def interval(self) -> tuple[Times, Times]:
        """(s, t) of the next step."""
        s, t = self.context.grid[self.num_left - 1 : self.num_left + 1].tolist()
        return self.canvas.constant_times(s), self.canvas.constant_times(t)

    @property
    def noise(self) -> Noise:
        """The random numbers of the next step."""
        return Noise(self.seed, step=self.num_left - 1)

    @property
    def targets(self) -> PositionMask:
        """The positions at which the next step needs the network."""
        return self.process.targets(self.x)


class GridSampler(Sampler):
    """A sampler that makes one reverse step after another over the time grid, all sequences together."""

    def resolve(self, context: SamplingContext) -> Sampler:
        context.tokens_process(self)
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> GridState:
        """Noise at the end of the time grid; if that is before 1, all that is editable was masked by then."""
        num_steps, time = len(context.grid) - 1, canvas.constant_times(float(context.grid[-1]))
        tokens = context.tokens_process(self).prior(canvas, Noise(seed, step=num_steps)).tokens
        return GridState.begin(context, canvas, seed, tokens, time, done=False, num_left=num_steps)

    def query(self, state: GridState) -> Query | None:
        return Query.of(state.x, state.interval[1], state.targets)


@register("ancestral")
@dataclass(frozen=True)
class Ancestral(GridSampler):
    """Makes one reverse step after another."""

    def update(self, state: GridState, answer: TargetLogProbs | None) -> GridState:
        """x_s ~ p(x_s | x_t)."""
        return after_step(state, draw_step(state, answer, state.interval[0]).tokens)


def draw_step(state: GridState, log_f: TargetLogProbs | None, s: Times) -> Batch:
    """x_t with every target position drawn from p(x_s | x_t)."""
    if log_f is None:
        return state.x
    x_t, targets, t = state.x, state.targets, state.interval[1]
    log_p = state.process.reverse(x_t, log_f, s, t, state.context.warper)
    uniform = state.noise.per_position(x_t, Purpose.SAMPLE)
    return replace(x_t, tokens=x_t.tokens.masked_scatter(targets, draw(log_p, uniform[targets])))


def after_step(state: GridState, tokens: Tokens) -> GridState:
    """The state at s."""
    num_left = state.num_left - 1
    return state.advance(tokens, state.interval[0], state.targets.any(dim=1), num_left == 0, num_left=num_left)
