"""Thinning (Lewis & Shedler 1979, "Simulation of nonhomogeneous Poisson processes by thinning"), for `SkipExact`.

The same draws as in `lookahead`, arranged so that a GPU is never waited for. A step k = (s, t) of the time grid draws
every masked position i, at numbers u and u' of this pair (k, i):

    v ~ p(v | x_t, t), warped, at u';   unmasked if u < r_{s|t}(v)

A pair with u ≥ max_v r_{s|t}(v) leaves its position masked whatever the network says. The others, the *candidates*, are
known before the first call unless the mean information is guessed, and a position has few of them however many steps
there are. A round evaluates the next candidates of each sequence whose positions are still masked, always whole steps.
The first step with an unmasking takes place; what comes after it is evaluated again, from the next answer.

Which candidates come next is computed on the device, and their number is fixed: if steps are so large that they exceed
the budget of a round, the last sequences wait. So the loop launches kernels without knowing what they find, and a GPU
reports which sequences are finished one round later. Launching is what takes the time: all that depends on the step and
the token alone is in tables, and what a round knows of a candidate is fetched at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, PositionMask, TargetLogProbs, to_device
from diffusionbert.diffusion.tokens import require_possible
from diffusionbert.samplers.base import Query, SamplingContext, State
from diffusionbert.samplers.plan import PlannedCall, plan_targets

AT_ONCE: Final = 12
"""A sequence evaluates whole steps up to so many candidates in a round, and at least one step. For 32 texts of 64
tokens, top-k 30, that makes 69 rounds; 16 would make 67, each with a third more candidates, and 8 would make 85."""
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
    """The pairs of a step and a position that may be unmasked, C for each sequence, from the last step to the first."""

    step: Tensor  # [B, C]; after a sequence's last candidate, the number of steps
    position: Tensor  # [B, C]
    end: Tensor  # [B, C]: the index of the last candidate of the same step
    indices: Tensor  # [3, B·C]: step, sequence, and position in the flattened batch
    uniform: Tensor  # [2, B·C]: u and u'


@dataclass(frozen=True, eq=False)
class _Tables:
    """What the steps make of the tokens, [steps, V]."""

    log_weights: Tensor  # log p(v | x_t, t) - log f(v | x_t), up to a constant; -inf for forbidden tokens
    unmask_probability: Tensor  # r_{s|t}(v)


@dataclass(frozen=True, eq=False)
class _Call:
    """What rounds share as long as the same sequences are sent to the network."""

    planned: PlannedCall
    num_sequences: int
    sent: Tensor  # [B·L]: the index of each position in the flattened sequences that are sent; 0 if it is not sent
    at_once: int  # the candidates of a sequence in a round: `AT_ONCE`, or fewer if there are many sequences
    slots: Tensor  # 1, 2, … up to the budget of a round


@dataclass(frozen=True, eq=False)
class _Round:
    """The candidates that a round evaluates, as many as its budget; what it does not need repeats another one."""

    indices: Tensor
    uniform: Tensor
    is_used: Tensor
    last: Counts  # where sequences are after the round unless a token is unmasked


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

    `calls` counts the answers that changed a token, not how often one that still holds was computed again: that depends
    on the other sequences.
    """

    process: Absorbing
    grid: Grid
    seen: PositionMask  # the attention mask, on the CPU
    candidates: Candidates
    tables: _Tables | None  # None before the first answer
    at: Counts  # the index of each sequence's time; a finished sequence is at 0
    call: _Call  # about the sequences not known to be finished
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
    end = torch.searchsorted(-step, -step, right=True) - 1
    row = torch.arange(len(size), device=grid.device)[:, None].expand(shape)
    indices = torch.stack([step.clamp(min=0), row, row * length + position]).flatten(1)
    step = torch.where(step < 0, len(largest), step)
    return Candidates(step, position, end, indices, torch.stack([for_unmasking, for_token]).flatten(1))


def start_thinning(
    context: SamplingContext, process: Absorbing, canvas: Batch, seed: int, candidates: Candidates
) -> ThinningState:
    """All sequences at the end of the time grid, with all that is editable masked."""
    grid, x = context.grid.to(canvas.tokens.device), process.prior(canvas, Noise(seed))
    at, seen = torch.full_like(canvas.example, len(grid) - 1), canvas.attention_mask.cpu()
    is_left = _is_left(candidates, x.tokens == process.mask_id, at)
    unfinished = is_left.any(dim=1)
    call = _call(process, unfinished.cpu(), seen, grid.device)
    at = at * unfinished
    return ThinningState.begin(
        context,
        canvas,
        seed,
        x.tokens,
        grid[at],
        process=process,
        grid=grid,
        seen=seen,
        candidates=candidates,
        tables=None,
        at=at,
        call=call,
        next=_next_round(candidates, is_left, at, call),
        report=_Report.of(unfinished),
        is_possible=torch.ones_like(unfinished[:1]).all(),
    )


def query_candidates(state: ThinningState) -> Query:
    """The query about the positions of the next candidates, some of which repeat."""
    _, _, where = state.next.indices
    query = state.call.planned.query(state.tokens, state.canvas.attention_mask, state.time)
    return replace(query, positions=state.call.sent.index_select(0, where))


def next_candidates(state: ThinningState, log_f: TargetLogProbs) -> ThinningState:
    """Takes the sequences of a round to their next unmasking, or past the last candidate that was evaluated."""
    process, candidates = state.process, state.candidates
    tables = state.tables or _tables(state, log_f)
    tokens, at, is_possible = _draw(state, log_f, tables)
    is_left = _is_left(candidates, tokens == process.mask_id, at)
    unfinished = is_left.any(dim=1)  # a masked position always has a candidate left: the first step unmasks it
    report = _Report.of(unfinished)
    known = (state.report if _reports_later(tokens) else report).read()
    num_known = int(known.sum())
    done = not num_known
    if done or not _reports_later(tokens):
        require_possible(is_possible)
    is_same = done or num_known == state.call.num_sequences
    call = state.call if is_same else _call(process, known, state.seen, tokens.device)
    at = at * unfinished
    return state.advance(
        tokens,
        state.grid.index_select(0, at),
        (tokens != state.tokens).any(dim=1),
        done,
        tables=tables,
        at=at,
        call=call,
        next=_next_round(candidates, is_left, at, call),
        report=report,
        is_possible=is_possible,
    )


def _tables(state: ThinningState, log_f: TargetLogProbs) -> _Tables:
    """The tables of all steps, in the precision of an answer where they are added to it."""
    process, grid, warper = state.process, state.grid, state.context.warper
    process.guessed_center(state.x, log_f)  # rejects another vocabulary
    center = torch.full_like(grid[1:], process.corpus_mean)
    weights, unmask_probability = process.of_vocabulary(grid[:-1], grid[1:], center)
    return _Tables(warper.exclude(weights.log().to(log_f.dtype)), unmask_probability)


def _draw(state: ThinningState, log_f: TargetLogProbs, tables: _Tables) -> tuple[Tensor, Counts, Tensor]:
    """The tokens after a round, where each sequence then is, and whether all tokens so far could be drawn."""
    (step, sequence, where), (for_unmasking, for_token) = state.next.indices, state.next.uniform
    mask_id, is_used, warper = state.process.mask_id, state.next.is_used, state.context.config.warper()
    drawn, is_possible = warper.draw(log_f + tables.log_weights.index_select(0, step), for_token)
    is_unmasked = is_used & (for_unmasking < tables.unmask_probability[step, drawn])
    at = state.next.last.scatter_reduce(0, sequence, step * is_unmasked, "amax")
    is_reached = is_used & (step >= at.index_select(0, sequence))
    # A position can have several candidates, of which one at most takes place.
    difference = (drawn - mask_id) * (is_unmasked & is_reached)
    tokens = state.tokens.flatten().index_add(0, where, difference).view_as(state.tokens)
    return tokens, at, (is_possible | ~is_reached).all() & state.is_possible


def _is_left(candidates: Candidates, masked: PositionMask, at: Counts) -> Tensor:
    """The candidates [B, C] that are still to come."""
    return masked.gather(1, candidates.position) & (candidates.step < at[:, None])


def _next_round(candidates: Candidates, is_left: Tensor, at: Counts, call: _Call) -> _Round:
    """The candidates to evaluate next: whole steps of each sequence, of as many sequences as there are slots for."""
    step, slots = candidates.step, call.slots
    by_end = is_left.cumsum(dim=1).gather(1, candidates.end)  # how many up to the end of a candidate's step
    latest = (step * is_left).amax(dim=1, keepdim=True)
    is_wanted = is_left & ((by_end <= call.at_once) | (step == latest))
    number = is_wanted.flatten().cumsum(dim=0)
    by_sequence = number.view_as(step)[:, -1]  # how many up to the end of a sequence
    fits = by_sequence <= len(slots)
    num_used = (by_sequence * fits).amax()
    last = torch.where(is_wanted & fits[:, None], step, at[:, None]).amin(dim=1)
    index = torch.searchsorted(number, slots.minimum(num_used))
    indices, uniform = (values.index_select(1, index) for values in (candidates.indices, candidates.uniform))
    return _Round(indices, uniform, slots <= num_used, last)


def _call(process: Absorbing, known: Tensor, seen: PositionMask, device: torch.device) -> _Call:
    """The call about these sequences; its budget is always enough for one step of a sequence."""
    length, sequences = seen.shape[1], known.nonzero()[:, 0]
    (planned,) = plan_targets(sequences * length, [len(sequences)], seen, device)
    sent = torch.zeros_like(seen, dtype=torch.long)
    shown = torch.arange(len(sequences) * planned.length, device=seen.device)
    sent[sequences, : planned.length] = shown.view(len(sequences), -1)
    at_once = max(1, min(AT_ONCE, VALUES // len(process.information) // len(sequences)))
    slots = torch.arange(1, max(length, at_once * len(sequences)) + 1, device=device)
    return _Call(planned, len(sequences), to_device(sent.flatten(), device), at_once, slots)


def _reports_later(tokens: Tensor) -> bool:
    """Whether a round learns what the one before it has finished, to wait for nothing."""
    return tokens.is_cuda
