"""Thinning (Lewis & Shedler 1979, "Simulation of nonhomogeneous Poisson processes by thinning"), for `SkipExact`.

The same draws as in `lookahead`, arranged so that a GPU is never waited for. A step k = (s, t) of the time grid draws
every masked position i, at numbers u and u' of this pair (k, i):

    v ~ p(v | x_t, t), warped, at u';   unmasked if u < r_{s|t}(v)

A pair with u ≥ max_v r_{s|t}(v) leaves its position masked whatever the network says. The others, the *candidates*, are
known before the first call unless the mean information is guessed, and a position has few of them however many steps
there are. A round evaluates the next candidates of each sequence whose positions are still masked, always whole steps.
The first step with an unmasking takes place; what comes after it is evaluated again, from the next answer.

Which candidates come next is computed on the device, and their number is fixed: sequences share the budget of a round,
those at the latest times first. So the loop launches kernels without knowing what they find, and a GPU reports which
sequences are finished one round later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing, reweighted
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, Flags, Grid, PositionMask, TargetLogProbs
from diffusionbert.diffusion.tokens import draw_unchecked, require_possible
from diffusionbert.samplers.base import Query, SamplingContext, State
from diffusionbert.samplers.plan import PlannedCall, plan_targets

AT_ONCE: Final = 16
"""A sequence evaluates whole steps up to so many candidates in a round, and at least one step."""
BUDGET: Final = 16
"""So many candidates per unfinished sequence are evaluated in a round."""
VALUES: Final = 2**27
"""The most probabilities that a round evaluates."""
WEIGHTS: Final = 2**25
"""The weights of tokens in all steps above which they are not kept, and candidates not planned."""
CANDIDATES: Final = 2**15
"""The expected candidates of a sequence above which they are not planned."""
NUMBERS: Final = 2**23
"""The random numbers that are drawn at once to find candidates."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The pairs of a step and a position that may be unmasked, [B, C], from the last step to the first."""

    step: Tensor  # -1 after a sequence's last candidate
    position: Tensor
    for_unmasking: Tensor  # u
    for_token: Tensor  # u'
    end: Tensor  # the index of the last candidate of the same step


@dataclass(frozen=True, eq=False)
class _Round:
    """The candidates that a round evaluates, as many as its budget; what it does not need repeats another one."""

    index: Tensor  # into the flattened candidates
    is_used: Tensor
    called: Flags  # the sequences with a candidate


@dataclass(frozen=True, eq=False)
class _Report:
    """Flags on their way to the CPU."""

    flags: Tensor
    arrival: Any  # a CUDA event, None on a CPU

    @classmethod
    def of(cls, flags: Tensor) -> _Report:
        sent = flags.to("cpu", non_blocking=True)
        return cls(sent, torch.cuda.current_stream(flags.device).record_event() if flags.is_cuda else None)

    def read(self) -> Tensor:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.flags


@dataclass(frozen=True, eq=False, kw_only=True)
class ThinningState(State):
    """Sequences that go from candidate to candidate, each at its own time grid[at].

    `calls` counts answers, not how often one that still holds was computed again: that depends on the other sequences.
    """

    process: Absorbing
    grid: Grid
    seen: PositionMask  # the attention mask, on the CPU
    candidates: Candidates
    log_weights: Tensor | None  # log p(v | x_t, t) - log f(v | x_t) of each step; None before the first answer
    at: Counts  # the index of each sequence's time
    changed: Flags  # the sequences in which a token has changed since the last answer about them
    known: Tensor  # the sequences not known to be finished, on the CPU
    call: PlannedCall  # about these sequences
    next: _Round
    report: _Report  # of the unfinished sequences
    is_possible: Tensor  # whether there was a token to draw at all positions so far


def plan_candidates(context: SamplingContext, process: Absorbing, canvas: Batch, seed: int) -> Candidates | None:
    """All candidates; None if they depend on an answer, or if there are too many to keep."""
    grid, length = context.grid.to(canvas.tokens.device), canvas.tokens.shape[1]
    if (
        process.guesses_center
        or (len(grid) - 1) * len(process.information) > WEIGHTS
        or not bool(canvas.editable.any())
    ):
        return None
    center = torch.full_like(grid[1:], process.corpus_mean)
    largest = process.max_unmask_probability(grid[:-1], grid[1:], center)
    if length * float(largest.sum()) > CANDIDATES:
        return None
    steps, found = torch.arange(len(largest) - 1, -1, -1, device=grid.device), []
    for some in torch.split(steps, max(1, NUMBERS // canvas.tokens.numel())):
        noise, example = Noise(seed, some.repeat(len(canvas.example))), canvas.example.repeat_interleave(len(some))
        for_unmasking, for_token = (
            noise.uniform(example, purpose, length).view(-1, len(some), length)
            for purpose in (Purpose.UNMASK, Purpose.SAMPLE)
        )
        is_candidate = canvas.editable[:, None] & (for_unmasking < largest[some, None])
        sequence, number, position = is_candidate.nonzero().unbind(dim=1)
        found.append((sequence, some[number], position, for_unmasking[is_candidate], for_token[is_candidate]))
    sequence, *own = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = sequence.argsort(stable=True)
    sequence, (step, *own) = sequence[order], [values[order] for values in own]
    size = torch.bincount(sequence, minlength=len(canvas.tokens))
    place = sequence, torch.arange(len(sequence), device=grid.device) - (size.cumsum(dim=0) - size)[sequence]
    shape = len(size), int(size.amax())
    step = step.new_full(shape, -1).index_put(place, step)
    position, for_unmasking, for_token = (values.new_zeros(shape).index_put(place, values) for values in own)
    return Candidates(step, position, for_unmasking, for_token, torch.searchsorted(-step, -step, right=True) - 1)


def start_thinning(
    context: SamplingContext, process: Absorbing, canvas: Batch, seed: int, candidates: Candidates
) -> ThinningState:
    """All sequences at the end of the time grid, with all that is editable masked."""
    grid, x = context.grid.to(canvas.tokens.device), process.prior(canvas, Noise(seed))
    masked, at = process.targets(x), torch.full_like(canvas.example, len(grid) - 1)
    unfinished, seen = masked.any(dim=1), canvas.attention_mask.cpu()
    known = unfinished.cpu()
    return ThinningState.begin(
        context,
        canvas,
        seed,
        x.tokens,
        torch.where(unfinished, grid[-1], 0.0),
        process=process,
        grid=grid,
        seen=seen,
        candidates=candidates,
        log_weights=None,
        at=at,
        changed=unfinished,
        known=known,
        call=_call(known, seen, grid.device),
        next=_next_round(candidates, masked, at, _budget(process, known, masked)),
        report=_Report.of(unfinished),
        is_possible=torch.ones_like(unfinished[:1]).all(),
    )


def query_candidates(state: ThinningState) -> Query:
    """The query about the positions of the next candidates, some of which repeat."""
    candidates, call, index = state.candidates, state.call, state.next.index
    sequence = index.div(candidates.step.shape[1], rounding_mode="floor")
    query = call.query(state.tokens, state.canvas.attention_mask, state.time)
    row = sequence if call.sequences is None else torch.searchsorted(call.sequences, sequence)
    # A round without candidates may repeat one of a sequence that is not sent; the answer is not used.
    positions = (row * call.length + candidates.position.flatten()[index]).clamp(max=query.tokens.numel() - 1)
    return Query(query.tokens, query.attention_mask, query.t, positions, query.is_padded)


def next_candidates(state: ThinningState, log_f: TargetLogProbs) -> ThinningState:
    """Takes the sequences of a round to their next unmasking, or past the last candidate that was evaluated."""
    process = state.process
    if state.log_weights is None:
        process.guessed_center(state.x, log_f)  # rejects another vocabulary
        center = torch.full_like(state.grid[1:], process.corpus_mean)
        log_weights = process.log_weights(state.grid[1:], center).to(log_f.dtype)
    else:
        log_weights = state.log_weights
    tokens, at, is_possible = _draw(state, log_f, log_weights)
    masked, called = state.canvas.editable & (tokens == process.mask_id), state.next.called
    unfinished = masked.any(dim=1)
    report = _Report.of(unfinished)
    known = (state.report if _reports_later(tokens) else report).read()
    done = not bool(known.any())
    if done or not _reports_later(tokens):
        require_possible(is_possible)
    is_same = done or torch.equal(known, state.known)
    return state.advance(
        tokens,
        torch.where(unfinished, state.grid[at], 0.0),
        called & state.changed,
        done,
        log_weights=log_weights,
        at=at,
        changed=torch.where(called, (tokens != state.tokens).any(dim=1), state.changed),
        known=known,
        call=state.call if is_same else _call(known, state.seen, tokens.device),
        next=_next_round(state.candidates, masked, at, _budget(process, known, masked)),
        report=report,
        is_possible=is_possible,
    )


def _draw(state: ThinningState, log_f: TargetLogProbs, log_weights: Tensor) -> tuple[Tensor, Counts, Tensor]:
    """The tokens after a round, where each sequence then is, and whether all tokens so far could be drawn."""
    process, candidates, index, is_used = state.process, state.candidates, state.next.index, state.next.is_used
    chosen = candidates.step, candidates.position, candidates.for_unmasking, candidates.for_token
    step, position, for_unmasking, for_token = (values.flatten()[index] for values in chosen)
    sequence = index.div(candidates.step.shape[1], rounding_mode="floor")
    drawn, is_possible = draw_unchecked(reweighted(log_f, log_weights, step, state.context.warper), for_token)
    center = torch.full_like(for_token, process.corpus_mean)
    r = process.unmask_probability_of(drawn, state.grid[step], state.grid[step + 1], center)
    is_unmasked = is_used & (for_unmasking < r)
    last = state.at.scatter_reduce(0, sequence, torch.where(is_used, step, len(state.grid)), "amin")
    at = last.scatter_reduce(0, sequence, torch.where(is_unmasked, step, -1), "amax")
    # A position can have several candidates, of which one at most takes place.
    difference = torch.where(is_unmasked & (step == at[sequence]), drawn - process.mask_id, 0)
    where = sequence * state.tokens.shape[1] + position
    tokens = state.tokens.flatten().index_add(0, where, difference).view_as(state.tokens)
    is_possible = is_possible | ~is_used | (step < at[sequence])
    return tokens, at, is_possible.all() & state.is_possible


def _next_round(candidates: Candidates, masked: PositionMask, at: Counts, budget: int) -> _Round:
    """The candidates to evaluate next: whole steps of each sequence, as long as the budget lasts."""
    step = candidates.step
    is_left = masked.gather(1, candidates.position) & (step < at[:, None]) & (step >= 0)
    by_end = is_left.cumsum(dim=1).gather(1, candidates.end)  # how many up to the end of a candidate's step
    in_first_step = torch.where(is_left, by_end, step.shape[1]).amin(dim=1)
    is_wanted = is_left & (by_end <= in_first_step.clamp(min=AT_ONCE)[:, None])
    order = torch.where(is_left, step, -1).amax(dim=1).argsort(descending=True, stable=True)
    fits = is_wanted.sum(dim=1)[order].cumsum(dim=0) <= budget
    is_wanted = is_wanted & torch.zeros_like(fits).scatter(0, order, fits)[:, None]
    number = is_wanted.flatten().cumsum(dim=0)
    slot = torch.arange(1, budget + 1, device=step.device)
    return _Round(torch.searchsorted(number, slot.minimum(number[-1])), slot <= number[-1], is_wanted.any(dim=1))


def _budget(process: Absorbing, known: Tensor, masked: PositionMask) -> int:
    """The candidates of a round; always enough for one step of a sequence."""
    most = VALUES // len(process.information)
    return max(masked.shape[1], AT_ONCE, min(BUDGET * int(known.sum()), most))


def _call(known: Tensor, seen: PositionMask, device: torch.device) -> PlannedCall:
    """A call about these sequences, whatever its targets."""
    first = known.nonzero()[:, 0] * seen.shape[1]
    return plan_targets(first, [len(first)], seen, device)[0]


def _reports_later(tokens: Tensor) -> bool:
    """Whether a round learns what the one before it has finished, to wait for nothing."""
    return tokens.is_cuda
