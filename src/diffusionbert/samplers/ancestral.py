"""Ancestral sampling (Ho et al. 2020, algorithm 2; Austin et al. 2021, D3PM).

    x_1 ~ prior,   x_s ~ p(x_s | x_t)  for every step (s, t) of the time grid, from the last to the first

It suits every process on tokens and every network. A masked position whose random number would leave it masked whatever
the network says is not asked about, so that the network is called at most once per step, and under absorbing noise for
few positions of few sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diffusionbert.diffusion.absorbing import Absorbing
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
        """The positions that the next step may change."""
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

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return isinstance(context.process, Absorbing)

    def query(self, state: GridState) -> Query | None:
        undecided = _undecided(state)
        return Query.of(state.x, state.interval[1], state.targets if undecided is None else undecided)

    def update(self, state: GridState, answer: TargetLogProbs | None) -> GridState:
        """x_s ~ p(x_s | x_t)."""
        undecided = _undecided(state)
        return after_step(state, draw_step(state, answer, state.interval[0], undecided).tokens, undecided)


def _undecided(state: GridState) -> PositionMask | None:
    """The positions of which a step needs to know more than their random number; None is all target positions."""
    if not isinstance(state.process, Absorbing):
        return None
    return state.process.may_unmask(state.x, *state.interval, state.noise.per_position(state.x, Purpose.SAMPLE))


def draw_step(state: GridState, log_f: TargetLogProbs | None, s: Times, targets: PositionMask | None = None) -> Batch:
    """x_t with all target positions, or these, drawn from p(x_s | x_t)."""
    x_t = state.x
    if log_f is None:
        return x_t
    chosen, asked = (state.targets, x_t) if targets is None else (targets, replace(x_t, editable=targets))
    log_p = state.process.reverse(asked, log_f, s, state.interval[1], state.context.warper)
    uniform = state.noise.per_position(x_t, Purpose.SAMPLE)
    return replace(x_t, tokens=x_t.tokens.masked_scatter(chosen, draw(log_p, uniform[chosen])))


def after_step(state: GridState, tokens: Tokens, targets: PositionMask | None = None) -> GridState:
    """The state at s, after a call about all target positions, or these."""
    num_left, called = state.num_left - 1, (state.targets if targets is None else targets).any(dim=1)
    return state.advance(tokens, state.interval[0], called, num_left == 0, num_left=num_left)
