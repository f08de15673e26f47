"""Looking ahead, for `SkipExact` where the time of the next unmasking cannot be drawn at once.

Temperature, top-k and top-p act on p(v | x_t, t), which then no longer telescopes; nor does it without reweighting.
Then each step k = (s, t) of the time grid draws every masked position i, at numbers u and u' of this pair (k, i):

    v ~ p(v | x_t, t), warped, at u';   unmasked if u < r_{s|t}(v)

As long as no token changes, these draws depend on the answer alone, so that a sequence can look ahead: it evaluates the
pairs with u < max_v r_{s|t}(v) of a window of steps at once. No other pair is unmasked, whatever its token. The first
step with an unmasking takes place; if the window has none, the sequence stands at its end and keeps the answer. Such a
*round* takes all unfinished sequences, each to its own next unmasking, with one network call for those that changed.
Pairs are planned on the CPU: a GPU is waited for once per round, twice if max_v r_{s|t}(v) depends on a guessed mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import (
    Batch,
    Counts,
    Flags,
    Grid,
    PerSequence,
    PerStep,
    PositionMask,
    TargetIndices,
    TargetLogProbs,
    Targets,
    to_device,
)
from diffusionbert.diffusion.tokens import require_possible
from diffusionbert.samplers.base import Query, SamplingContext, State
from diffusionbert.samplers.plan import plan_targets

UNMASKINGS: Final = 2
"""So many positions a linear schedule would unmask in the steps that a sequence looks ahead over."""
PAIRS: Final = 8
"""A sequence looks no further once it has so many pairs of a step and a position to evaluate."""
NUMBERS: Final = 2**16
"""The random numbers that are looked at at once for a sequence."""


@dataclass(frozen=True, eq=False)
class _Answer:
    """The network's answers at all masked positions."""

    positions: PositionMask  # on the CPU
    log_f: TargetLogProbs
    center: PerSequence


@dataclass(frozen=True, eq=False)
class _Windows:
    """The steps that sequences look ahead over, sequence by sequence; on the CPU and on the device."""

    sequences: Tensor
    ahead: Tensor  # 0 is a sequence's next step

    @classmethod
    def of(cls, num_editable: Counts, num_steps: int, length: int) -> _Windows:
        """So many steps that a linear schedule would unmask `UNMASKINGS` positions of a sequence in them."""
        size = (UNMASKINGS * num_steps / num_editable.clamp(min=1)).ceil().long()
        size = size.clamp(max=min(num_steps, max(1, NUMBERS // length))) * (num_editable > 0)
        sequences = torch.arange(len(size), device=size.device).repeat_interleave(size)
        start = (size.cumsum(dim=0) - size)[sequences]
        return cls(sequences, torch.arange(len(start), device=size.device) - start)

    def to(self, device: torch.device) -> _Windows:
        return _Windows(to_device(self.sequences, device), to_device(self.ahead, device))

    def steps(self, at: Counts) -> Tensor:
        """The k of each step (grid[k], grid[k + 1]) in the windows of sequences at grid[at]; negative after 0."""
        return at[self.sequences] - 1 - self.ahead


@dataclass(frozen=True, eq=False, kw_only=True)
class LookaheadState(State):
    """Sequences that look ahead to their next unmasking, each at its own time grid[at]."""

    process: Absorbing
    grid: Grid
    seen: PositionMask  # the attention mask, on the CPU, as the next five
    windows: _Windows
    at: Counts  # the index of each sequence's time; a finished sequence is at 0
    masked: PositionMask
    may_unmask: Tensor | None  # the pairs (step of a window, position) to evaluate, unless they depend on an answer
    changed: Flags  # unfinished sequences in which a token has changed since the last answer
    uniform: Tensor | None  # the numbers of all pairs, with `may_unmask`
    device_windows: _Windows
    fastest: PerStep | None  # the largest r_{s|t} of each step, unless it depends on an answer
    answer: _Answer | None
    is_possible: Tensor  # whether there was a token to draw at all positions so far


def start_looking_ahead(context: SamplingContext, process: Absorbing, canvas: Batch, seed: int) -> LookaheadState:
    """All sequences at the end of the time grid, with all that is editable masked."""
    device, grid = canvas.tokens.device, context.grid.to(canvas.tokens.device)
    x, num_steps = process.prior(canvas, Noise(seed)), len(grid) - 1
    seen, masked = canvas.attention_mask.cpu(), process.targets(x).cpu()
    unfinished = masked.any(dim=1)
    windows = _Windows.of(masked.sum(dim=1), num_steps, masked.shape[1])
    fastest = None
    if not process.guesses_center:
        fastest = _fastest(process, grid[:-1], grid[1:], grid.new_full((num_steps,), process.corpus_mean))
    state = LookaheadState.begin(
        context,
        canvas,
        seed,
        x.tokens,
        to_device(torch.where(unfinished, context.grid[-1], 0.0), device),
        process=process,
        grid=grid,
        seen=seen,
        windows=windows,
        at=torch.where(unfinished, num_steps, 0),
        masked=masked,
        may_unmask=None,
        changed=unfinished,
        uniform=None,
        device_windows=windows.to(device),
        fastest=fastest,
        answer=None,
        is_possible=torch.ones((), dtype=torch.bool, device=device),
    )
    if fastest is None:
        return state
    uniform, may_unmask = _look_ahead(state, x, to_device(state.at, device))
    return replace(state, uniform=uniform, may_unmask=may_unmask.cpu())


def query_changed(state: LookaheadState) -> Query | None:
    """The query about the masked positions of sequences in which a token has changed since the last answer."""
    where = _where(state.masked & state.changed[:, None])
    if not len(where):
        return None
    (call,) = plan_targets(where, [len(where)], state.seen, state.tokens.device)
    return call.query(state.tokens, state.canvas.attention_mask, state.time)


def next_round(state: LookaheadState, log_f: TargetLogProbs | None) -> LookaheadState:
    """Takes each sequence from grid[at] to its next unmasking, or to the end of its window."""
    answer = state.answer if log_f is None else _merged(state, log_f)
    assert answer is not None
    uniform, may_unmask = state.uniform, state.may_unmask
    if uniform is None or may_unmask is None:
        uniform, found = _look_ahead(state, state.x, to_device(state.at, state.tokens.device), answer.center)
        may_unmask = found.cpu()  # here a GPU is waited for
    tokens, at, is_possible = _draw(state, answer, uniform, may_unmask)
    x = replace(state.canvas, tokens=tokens)
    own: dict[str, Any] = {"answer": answer, "is_possible": is_possible}
    known = [at, state.process.targets(x).flatten()]
    if state.fastest is not None:
        own["uniform"], found = _look_ahead(state, x, at)
        known.append(found.flatten())
    # Here a GPU is waited for.
    at, masked, *rest = torch.split(torch.cat(known).cpu(), [len(part) for part in known])
    masked = masked.view_as(state.masked).bool()
    unfinished, changed = masked.any(dim=1), (masked != state.masked).any(dim=1)
    at = torch.where(unfinished, at, 0)
    done = not bool(at.any())
    if done or not tokens.is_cuda:
        require_possible(is_possible)
    time = to_device(torch.where(unfinished, state.context.grid[at], 0.0), tokens.device)
    own |= {"at": at, "masked": masked, "changed": unfinished & changed}
    own["may_unmask"] = rest[0].view_as(may_unmask).bool() if rest else None
    return state.advance(tokens, time, to_device(state.changed, tokens.device), done, **own)


def _where(marked: Tensor) -> TargetIndices:
    """The indices of what is marked, numbered through all sequences."""
    return marked.flatten().nonzero()[:, 0]


def _fastest(process: Absorbing, s: Tensor, t: Tensor, center: Tensor) -> Tensor:
    """The largest r_{s|t} of each of these intervals, some at once."""
    parts = zip(*(torch.split(values, 64) for values in (s, t, center)), strict=True)
    return torch.cat([process.max_unmask_probability(*part) for part in parts])


def _look_ahead(
    state: LookaheadState, x: Batch, at: Counts, center: PerSequence | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers of all pairs of x's windows, and which may be unmasked; given guessed means if these matter."""
    windows, process = state.device_windows, state.process
    steps, sequences = windows.steps(at), windows.sequences
    if state.fastest is not None:
        fastest = state.fastest[steps]
    else:
        assert center is not None
        fastest = _fastest(process, state.grid[steps], state.grid[steps + 1], center[sequences])
    uniform = Noise(state.seed, steps).uniform(x.example[sequences], Purpose.UNMASK, x.tokens.shape[1])
    return uniform, process.targets(x)[sequences] & (uniform < fastest[:, None]) & (steps >= 0)[:, None]


def _merged(state: LookaheadState, log_f: TargetLogProbs) -> _Answer:
    """The answers at all masked positions: the new ones, and the old ones of sequences that have not changed."""
    masked, process = state.masked, state.process
    old = masked & ~state.changed[:, None]
    if state.answer is not None and bool(old.any()):
        parts = [_where(old[masked]), _where(old[state.answer.positions]), _where(~old[masked])]
        to, from_, new = torch.split(to_device(torch.cat(parts), log_f.device), [len(part) for part in parts])
        merged = log_f.new_empty(int(masked.sum()), log_f.shape[1])
        merged.index_copy_(0, to, state.answer.log_f.index_select(0, from_))
        log_f = merged.index_copy_(0, new, log_f)
    targets = Targets(to_device(_where(masked), log_f.device), process.targets(state.x))
    return _Answer(masked, log_f, process.guessed_center(state.x, log_f, targets))


def _draw(state: LookaheadState, answer: _Answer, uniform: Tensor, may_unmask: Tensor) -> tuple[Tensor, Counts, Tensor]:
    """The tokens after each sequence's next unmasking, where it then is, and whether they could be drawn."""
    process, x, device = state.process, state.x, state.tokens.device
    num_sequences, length = x.tokens.shape
    # A sequence looks no further once it has enough pairs.
    number = may_unmask.sum(dim=1)
    before = number.cumsum(dim=0) - number
    start = torch.arange(len(number), device=number.device) - state.windows.ahead
    looked_at = before - before[start] < PAIRS
    end = state.at - torch.bincount(state.windows.sequences[looked_at], minlength=num_sequences)
    row, position = (may_unmask & looked_at[:, None]).nonzero().unbind(dim=1)
    if not len(row):
        return x.tokens, to_device(end.clamp(min=0), device), state.is_possible
    sequences, steps = state.windows.sequences[row], state.windows.steps(state.at)[row]
    # p(v | x_t, t) / f(v | x_t) is the same for all pairs of a step, and of a sequence if it has its own mean.
    key = steps * num_sequences + (sequences if process.guesses_center else 0)
    key, group = torch.unique(key, return_inverse=True)
    where = sequences * length + position
    answered = answer.positions.flatten().cumsum(dim=0)[where] - 1
    pair, end = row * length + position, end.clamp(min=0)
    parts = [sequences, steps, position, pair, where, answered, group, key // num_sequences, key % num_sequences, end]
    moved = torch.split(to_device(torch.cat(parts), device), [len(part) for part in parts])
    sequences, steps, position, pair, where, answered, group, group_step, group_sequence, end = moved

    s, t, center = state.grid[group_step], state.grid[group_step + 1], answer.center[group_sequence]
    for_token = Noise(state.seed, steps).uniform(x.example[sequences], Purpose.SAMPLE, length)
    log_p = process.log_p0(answer.log_f.index_select(0, answered), group, t, center)
    drawn, is_possible = state.context.warper.draw(log_p, for_token.gather(1, position[:, None])[:, 0])
    r = process.unmask_probability_of(drawn, s[group], t[group], center[group])
    unmasked = uniform.flatten()[pair] < r
    at = end.scatter_reduce(0, sequences, torch.where(unmasked, steps, -1), "amax")
    first = steps == at[sequences]
    # A position can be in several pairs, of which one at most takes place.
    difference = torch.where(unmasked & first, drawn - process.mask_id, 0)
    tokens = x.tokens.flatten().index_add(0, where, difference).view_as(x.tokens)
    is_reached = steps >= at[sequences]
    return tokens, at, (is_possible | ~is_reached).all() & state.is_possible
