"""`Exact` chooses the sampler with the fewest network calls. `SkipExact` skips calls exactly for time-agnostic networks
under token-dependent schedules (the spindle, He et al. 2022, eq. 9-11).

An answer f(v | x_t) that does not depend on the time holds until a token of the sequence changes. Until then, token and
interval (s, s') of the next unmasking of a position masked at t have a joint distribution, drawn token first:

    P(v, (s, s')) = f(v)·(ᾱ_s(v) - ᾱ_s'(v)) / G_t,   G_t = Σ_u f(u)·(1 - ᾱ_t(u))
    v ~ f(v)·(1 - ᾱ_t(v)) / G_t = p(v | x_t, t)               the masked token
    unmasked at s if u < r_{s|t}(v)                           one number u for all s; the first such s, by bisection

The earliest unmasking of a sequence takes place; its other positions are drawn anew from the network's next answer,
since the chain is Markov. The guessed sentence mean ĉ holds as long as f does, so all this is true with it, too.

Temperature, top-k and top-p act on p(v | x_t, t), which then no longer telescopes; nor does it without reweighting.
Then sequences look ahead over the steps of the time grid (`lookahead`), on a GPU without waiting for it (`thinning`).

Texts are distributed exactly as by `Ancestral` over the same time grid, with at most L network calls per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, TargetLogProbs, sequence_index
from diffusionbert.diffusion.tokens import draw
from diffusionbert.registry import register
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.base import AnyQuery, Query, Sampler, SamplingContext, State
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.lookahead import LookaheadState, next_round, query_changed, start_looking_ahead
from diffusionbert.samplers.thinning import (
    ThinningState,
    next_candidates,
    plan_candidates,
    query_candidates,
    start_thinning,
)


@register("exact")
@dataclass(frozen=True)
class Exact(Sampler):
    """The model's own distribution with the fewest network calls: first-hitting, skip-exact or ancestral sampling.

    All three give texts of the same distribution over the same time grid. First-hitting needs a schedule that treats
    all tokens alike, skip-exact a time-agnostic network; ancestral sampling suits every diffusion on tokens.
    """

    def resolve(self, context: SamplingContext) -> Sampler:
        process = context.tokens_process(self)
        if isinstance(process, Absorbing) and not process.schedule.by_token:
            return FirstHitting()
        if isinstance(process, Absorbing) and context.time_agnostic:
            return SkipExact()
        return Ancestral()

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return self.resolve(context).keeps_tokens(context)

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> State:
        return self.resolve(context).start(context, canvas, seed)

    def query(self, state: State) -> AnyQuery | None:
        return self.resolve(state.context).query(state)

    def update(self, state: State, answer: Any) -> State:
        return self.resolve(state.context).update(state, answer)


@dataclass(frozen=True, eq=False, kw_only=True)
class JumpState(State):
    """Sequences that go from one unmasking to the next, each at its own time grid[at]."""

    process: Absorbing
    grid: Grid
    at: Counts  # the index of each sequence's time; a finished sequence is at 0
    num_events: int  # the unmaskings of each unfinished sequence so far: one per update


@register("skip-exact")
@dataclass(frozen=True)
class SkipExact(Sampler):
    """Calls a time-agnostic network only after a token of the sequence has changed."""

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return True

    def resolve(self, context: SamplingContext) -> SkipExact:
        context.absorbing(self)
        if not context.time_agnostic:
            raise ValueError(
                "the sampler 'skip-exact' reuses the network's answers over time, but this network is "
                "time-conditioned; use 'ancestral'"
            )
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> JumpState | LookaheadState | ThinningState:
        process = context.absorbing(self)
        if not jumps(context):
            candidates = plan_candidates(context, process, canvas, seed) if _is_waited_for(canvas) else None
            if candidates is not None:
                return start_thinning(context, process, canvas, seed, candidates)
            return start_looking_ahead(context, process, canvas, seed)
        grid, x = context.grid.to(canvas.tokens.device), process.prior(canvas, Noise(seed))
        unfinished = process.targets(x).any(dim=1)
        time, at = torch.where(unfinished, grid[-1], 0.0), torch.where(unfinished, len(grid) - 1, 0)
        own = {"process": process, "grid": grid, "at": at, "num_events": 0}
        return JumpState.begin(context, canvas, seed, x.tokens, time, **own)

    def query(self, state: JumpState | LookaheadState | ThinningState) -> Query | None:
        if isinstance(state, JumpState):
            return Query.of(state.x, state.grid[state.at], state.process.targets(state.x))
        return query_candidates(state) if isinstance(state, ThinningState) else query_changed(state)

    def update(self, state: JumpState | LookaheadState | ThinningState, answer: TargetLogProbs | None) -> State:
        if isinstance(state, LookaheadState):
            return next_round(state, answer)
        assert answer is not None
        return _jump(state, answer) if isinstance(state, JumpState) else next_candidates(state, answer)


def _is_waited_for(canvas: Batch) -> bool:
    """Whether the CPU would wait for the results of a round; then it is cheaper to evaluate a few more candidates."""
    return canvas.tokens.is_cuda


def jumps(context: SamplingContext) -> bool:
    """Whether the time of the next unmasking can be drawn at once; excluding tokens does not prevent it."""
    process = context.process
    assert isinstance(process, Absorbing)
    return not process.schedule.by_token or (process.reweighted and context.config.is_plain)


def _jump(state: JumpState, log_f: TargetLogProbs) -> JumpState:
    """Takes each sequence from grid[at] to its next unmasking."""
    process, x, noise = state.process, state.x, Noise(state.seed, step=state.num_events)
    masked = process.targets(x)
    sequences, t = sequence_index(masked), state.grid[state.at]
    center = process.guessed_center(x, log_f)
    log_p = process.log_p0(log_f, sequences, t, center, state.context.warper)
    tokens = draw(log_p, noise.per_position(x, Purpose.SAMPLE)[masked])
    uniform = noise.per_position(x, Purpose.UNMASK)[masked]
    unmasked = _unmasked_at(process, tokens, state.grid, state.at[sequences], center[sequences], uniform)
    unmasked_at = torch.full_like(x.tokens, -1).masked_scatter(masked, unmasked)
    next_at = unmasked_at.amax(dim=1)
    due = masked & (unmasked_at == next_at[:, None])
    at = torch.where((masked & ~due).any(dim=1), next_at, 0)
    tokens = x.tokens.masked_scatter(due, tokens[due[masked]])
    own = {"at": at, "num_events": state.num_events + 1}
    return state.advance(tokens, state.grid[at], state.at > 0, not bool(at.any()), **own)


def _unmasked_at(process: Absorbing, tokens: Tensor, grid: Grid, at: Tensor, center: Tensor, uniform: Tensor) -> Tensor:
    """The largest k below `at` with uniform < r_{grid[k] | grid[at]}, which rises to 1 as k falls to 0."""
    low, high, t = torch.zeros_like(at), at, grid[at]
    for _ in range(len(grid).bit_length()):
        middle = (low + high) // 2
        unmasked = uniform < process.unmask_probability_of(tokens, grid[middle], t, center)
        low, high = torch.where(unmasked, middle, low), torch.where(unmasked, high, middle)
    return low
