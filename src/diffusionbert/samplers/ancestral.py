"""Ancestral sampling (Ho et al. 2020, algorithm 2; Austin et al. 2021, D3PM).

    x_1 ~ prior,   x_s ~ p(x_s | x_t)  for every step (s, t) of the time grid, from the last to the first

It suits every process on tokens and every network. A masked position whose random number leaves it masked whatever the
network says is not asked about, so that the network is called at most once per step, and under absorbing noise for few
positions of few sequences.

Where a schedule treats all tokens alike, random numbers alone say which positions a step unmasks, except where rounding
decides. So all queries are known before the first step (`plan`), and the loop waits for nothing that a GPU computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PositionMask, TargetLogProbs, Times, Tokens, to_device
from diffusionbert.diffusion.tokens import draw, draw_reverse, require_possible
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State
from diffusionbert.samplers.plan import PlannedCall, plan_targets

NUMBERS_AT_ONCE: Final = 2**24
"""The random numbers that are looked at at once when steps are planned: 128 MB."""


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

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> GridState:
        state = super().start(context, canvas, seed)
        is_known = isinstance(state.process, Absorbing) and not state.process.schedule.by_token
        return _planned(state) if is_known else state

    def query(self, state: GridState) -> Query | None:
        if isinstance(state, PlannedState):
            call = state.step.call
            if call is None:
                return None
            return call.query(state.tokens, state.canvas.attention_mask, state.interval[1])
        undecided = _undecided(state)
        return Query.of(state.x, state.interval[1], state.targets if undecided is None else undecided)

    def update(self, state: GridState, answer: TargetLogProbs | None) -> GridState:
        """x_s ~ p(x_s | x_t)."""
        if isinstance(state, PlannedState):
            return _planned_step(state, answer)
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
    uniform = state.noise.per_position(x_t, Purpose.SAMPLE)[chosen]
    if isinstance(state.process, Absorbing):
        tokens, is_possible = draw_reverse(log_p, state.process.mask_id, uniform)
        require_possible(is_possible)
    else:
        tokens = draw(log_p, uniform)
    return replace(x_t, tokens=x_t.tokens.masked_scatter(chosen, tokens))


def after_step(state: GridState, tokens: Tokens, targets: PositionMask | None = None) -> GridState:
    """The state at s, after a call about all target positions, or these."""
    num_left, called = state.num_left - 1, (state.targets if targets is None else targets).any(dim=1)
    return state.advance(tokens, state.interval[0], called, num_left == 0, num_left=num_left)


# ---- steps that are known ahead -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """What one step draws: at the positions that it unmasks, and at the few where rounding decides if it does."""

    call: PlannedCall | None  # None if it draws nothing
    uniform: Tensor  # one number per target
    called: Tensor  # the sequences with a target


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedState(GridState):
    """x_t at a time of the grid, and what the next steps draw."""

    steps: tuple[PlannedStep, ...]  # from the last of the grid to the first
    is_possible: Tensor  # whether there was a token to draw at all positions so far

    @property
    def step(self) -> PlannedStep:
        """The next one."""
        return self.steps[-self.num_left]


def _planned(state: GridState) -> PlannedState:
    """The same state with all its steps."""
    num_steps, (num_sequences, length), device = state.num_left, state.tokens.shape, state.tokens.device
    number, where, uniform = _due(state)
    # Here a GPU is waited for, and nowhere else until the last step.
    number, where, seen = (values.cpu() for values in (number, where, state.canvas.attention_mask))
    sizes = torch.bincount(number, minlength=num_steps)
    calls = iter(plan_targets(where, sizes[sizes > 0].tolist(), seen, device))
    called = torch.zeros(num_steps, num_sequences, dtype=torch.bool, device=number.device)
    called[number, where // length] = True
    parts = zip(sizes.tolist(), torch.split(uniform, sizes.tolist()), to_device(called, device), strict=True)
    steps = tuple(PlannedStep(next(calls) if size else None, *part) for size, *part in parts)
    own = {field.name: getattr(state, field.name) for field in fields(state)}
    return PlannedState(**own, steps=steps, is_possible=torch.ones((), dtype=torch.bool, device=device))


def _due(state: GridState) -> tuple[Tensor, Tensor, Tensor]:
    """For each target of each step: the number of the step from the end of the grid, its position, a random number."""
    assert isinstance(state.process, Absorbing)
    x, num_steps, device = state.x, state.num_left, state.tokens.device
    undecided, (num_sequences, length) = state.targets, state.tokens.shape
    may, must = (bounds[:, None, None] for bounds in state.process.unmasking(state.context.grid.to(device)))
    at_once, found = max(1, NUMBERS_AT_ONCE // max(1, x.tokens.numel())), []
    for steps in torch.split(torch.arange(num_steps - 1, -1, -1, device=device), at_once):
        noise = Noise(state.seed, steps.repeat_interleave(num_sequences))
        uniform = noise.uniform(x.example.repeat(len(steps)), Purpose.SAMPLE, length)
        uniform = uniform.view(len(steps), num_sequences, length)
        is_unmasked = uniform > must[steps]
        was_unmasked = is_unmasked.cumsum(dim=0) > is_unmasked  # in a step before
        due = (uniform > may[steps]) & undecided & ~was_unmasked
        index, where = due.flatten(1).nonzero().unbind(dim=1)
        found.append((num_steps - 1 - steps[index], where, uniform[due]))
        undecided = undecided & ~is_unmasked.any(dim=0)
    number, where, uniform = (torch.cat(parts) for parts in zip(*found, strict=True))
    return number, where, uniform


def _planned_step(state: PlannedState, log_f: TargetLogProbs | None) -> PlannedState:
    step, (s, t), process, tokens = state.step, state.interval, state.process, state.tokens
    assert isinstance(process, Absorbing)
    num_left, is_possible = state.num_left - 1, state.is_possible
    if step.call is not None:
        assert log_f is not None
        where = step.call.where
        sequences = where.div(tokens.shape[1], rounding_mode="floor")
        log_p = process.reverse(state.x, log_f, s, t, state.context.warper, sequences)
        drawn, could_be_drawn = draw_reverse(log_p, process.mask_id, step.uniform)
        is_possible = could_be_drawn.all() & is_possible
        before = tokens.flatten()
        # A step before may have unmasked what rounding decides.
        drawn = torch.where(before[where] == process.mask_id, drawn, before[where])
        tokens = before.index_copy(0, where, drawn).view_as(tokens)
    if num_left == 0 or (log_f is not None and not log_f.is_cuda):  # a GPU is not waited for in between
        require_possible(is_possible)
    own = {"num_left": num_left, "is_possible": is_possible}
    return state.advance(tokens, s, step.called, num_left == 0, **own)
