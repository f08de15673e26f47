"""First-hitting sampling (Zheng et al. 2024, "Masked diffusion models are secretly time-agnostic masked models").

If a schedule treats all tokens alike, the interval (s, t) of the time grid in which a position is unmasked does not
depend on the tokens:

    P(unmasked in (s, t)) = (ᾱ_s - ᾱ_t) / (1 - ᾱ_start)      independently for each position
    token ~ f(v | x_t, t)                                     warped, when its interval comes

So the intervals are drawn first, and the network is called only at those times, with each sequence's own t: at most
min(L, T) calls per sequence. Texts have exactly the distribution of `Ancestral` over the same time grid, for every
network. A finer grid costs nothing: continuous time is `steps=1_000_000`.

Once the intervals are known, so are all queries (`plan`): the loop never waits for a GPU to compute something.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, PerPosition, TargetLogProbs, to_device
from diffusionbert.diffusion.tokens import require_possible
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State
from diffusionbert.samplers.plan import PlannedCall, plan_calls


@dataclass(frozen=True, eq=False, kw_only=True)
class FirstHittingState(State):
    """The planned calls, and how many of them have been made."""

    plan: tuple[PlannedCall, ...]
    query_times: Tensor  # [calls, B]: the time that each call gives to the network, for each sequence
    times: Tensor  # [calls + 1, B]: where a sequence is before each call, and after the last one
    num_calls: Counts  # how many calls each sequence needs
    number: int  # the number of the next call
    uniform: PerPosition  # one number per position, to draw its token with
    is_possible: Tensor  # whether there has been a token to draw at all positions so far


@register("first-hitting")
@dataclass(frozen=True)
class FirstHitting(Sampler):
    """Draws when each position is unmasked, then calls the network only at those times.

    With each update, every unfinished sequence moves on to its own next time.
    """

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return True

    def resolve(self, context: SamplingContext) -> FirstHitting:
        schedule = context.absorbing(self).schedule
        if schedule.by_token:
            raise ValueError(
                f"the sampler 'first-hitting' draws unmasking times first, but under {schedule} they depend on the "
                "token; use 'skip-exact' with a time-agnostic network, 'ancestral' with any other"
            )
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> FirstHittingState:
        process, noise, device = context.absorbing(self), Noise(seed), canvas.tokens.device
        x = process.prior(canvas, noise)
        drawn = _intervals(process, context.grid.to(device), noise.per_position(x, Purpose.UNMASK))
        # The only place that waits for a GPU, but for the check after the last call.
        interval, editable, seen = (values.cpu() for values in (drawn, canvas.editable, canvas.attention_mask))
        number, latest = _numbered(interval.masked_fill(~editable, -1))
        plan = plan_calls(number, seen, device)
        query_times, times = _times(context.grid, latest[:, : len(plan)])
        tables = (to_device(table, device) for table in (query_times, times, number.amax(dim=1) + 1))
        own = dict(zip(("query_times", "times", "num_calls"), tables, strict=True))
        return FirstHittingState.begin(
            context,
            canvas,
            seed,
            x.tokens,
            own["times"][0],
            **own,
            done=not plan,
            plan=plan,
            number=0,
            uniform=noise.per_position(x, Purpose.SAMPLE),
            is_possible=torch.ones((), dtype=torch.bool, device=device),
        )

    def query(self, state: FirstHittingState) -> Query:
        """The positions that are due, each sequence at its own time."""
        call = state.plan[state.number]
        return call.query(state.tokens, state.canvas.attention_mask, state.query_times[state.number])

    def update(self, state: FirstHittingState, answer: TargetLogProbs) -> FirstHittingState:
        where, number = state.plan[state.number].where, state.number + 1
        drawn, is_possible = state.context.warper.draw(answer, state.uniform.flatten()[where])
        is_possible, done = is_possible.all() & state.is_possible, number == len(state.plan)
        if done or not answer.is_cuda:  # the check waits for a GPU, so there it is left to the end
            require_possible(is_possible)
        tokens = state.tokens.flatten().index_copy(0, where, drawn).view_as(state.tokens)
        own = {"number": number, "is_possible": is_possible}
        return state.advance(tokens, state.times[number], state.number < state.num_calls, done, **own)


def _numbered(interval: Tensor) -> tuple[Tensor, Tensor]:
    """Assigns positions to calls by their intervals [B, L], which are -1 where a position has none.

    Returns:
        The number of each position's call, -1 if it has none: intervals come in decreasing order, and positions with
        the same one share a call. Then the interval of each call [B, L], -1 after the last.
    """
    falling, order = interval.sort(dim=1, descending=True)
    rank = (falling.diff(dim=1, prepend=falling[:, :1]) != 0).cumsum(dim=1)
    latest = torch.full_like(interval, -1).scatter(1, rank, falling)
    return torch.zeros_like(interval).scatter(1, order, rank).masked_fill(interval < 0, -1), latest


def _times(grid: Grid, latest: Tensor) -> tuple[Tensor, Tensor]:
    """The times of calls [calls, B] with these intervals [B, calls]; and the times between them [calls + 1, B]."""
    latest = latest.T
    is_left = latest >= 0
    start = torch.where(is_left[:1], grid[-1], 0.0) if len(latest) else grid.new_zeros(1, latest.shape[1])
    between = torch.where(is_left[1:], grid[latest[:-1]], 0.0)
    return grid[latest + 1], torch.cat([start, between, torch.zeros_like(start)[: len(latest)]])


def _intervals(process: Absorbing, grid: Grid, uniform: PerPosition) -> Tensor:
    """For each position, the index k of the interval (grid[k], grid[k + 1]) in which it is unmasked."""
    masked = 1 - process.schedule.survival(grid, torch.ones_like(grid))
    interval = torch.searchsorted(masked, uniform * masked[-1], right=True) - 1
    # Where the grid ends so early that 1 - ᾱ rounds to 0, the first step unmasks.
    return interval.clamp(max=len(grid) - 2)
