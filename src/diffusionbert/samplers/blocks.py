"""Semi-autoregressive sampling (Nie et al. 2025, "Large language diffusion models" (LLaDA), section 2.4).

The editable positions of a sequence are cut into consecutive blocks. Another sampler generates one block after the
other, with only that block editable: what comes before is frozen, what comes after is `[MASK]`.

If a sequence is longer than the network can read, it sees a window: the first position (`[CLS]`), the last (`[SEP]`)
and one run of positions around the block. Three quarters of the room left by the block go before it, where the text is,
and one quarter after it, where there are mostly masks; near either end of the sequence, the run is shifted to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import Batch, Counts, TargetIndices, Times, Tokens
from diffusionbert.registry import register
from diffusionbert.samplers.base import AnyQuery, Sampler, SamplingContext, State
from diffusionbert.samplers.exact import Exact


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockState(State):
    """The inner sampler's state on the current block."""

    block: Tensor  # [B, L]: the number of each position's block, -1 where it is not editable
    number: int  # the number of the current block
    sequences: TargetIndices  # the sequences that have this block
    positions: Tensor  # the positions of each one's window
    before: tuple[Tokens, Times, Counts]  # tokens, time and calls before this block
    inner: State | None  # None once all blocks are done

    @property
    def num_blocks(self) -> Counts:
        return self.block.amax(dim=1) + 1


@register("blocks")
@dataclass(frozen=True)
class Blocks(Sampler):
    """Lets another sampler generate one block after another.

    A time-conditioned network is given the inner sampler's time, that of the block. The time of a sequence is averaged
    over its blocks: with b of n blocks left and the current one at time t, it is (b - 1 + t) / n.

    Args:
        size: The largest number of editable positions per block.
        inner: The sampler of each block.
    """

    size: int = 32
    inner: Sampler = Exact()

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return self.inner.keeps_tokens(context)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a block must have at least 1 position, got {self.size}; 32 is usual")

    def resolve(self, context: SamplingContext) -> Blocks:
        context.absorbing(self)
        if context.max_length is not None and context.max_length < self.size + 2:
            raise ValueError(
                f"a block of {self.size} positions does not fit a window of {context.max_length} with the first and "
                f"the last position of the sequence; use at most {context.max_length - 2}"
            )
        return replace(self, inner=self.inner.resolve(context))

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> BlockState:
        block = _blocks(canvas, self.size, context.max_length)
        tokens = canvas.tokens.masked_fill(canvas.editable, context.mask_id)
        time, calls = (block.amax(dim=1) >= 0).double(), torch.zeros_like(canvas.example)
        first = {"block": block, "number": -1, "before": (tokens, time, calls), "inner": None}
        nothing = block.new_zeros(0)
        state = BlockState.begin(context, canvas, seed, tokens, time, **first, sequences=nothing, positions=nothing)
        return self._next_block(state)

    def query(self, state: BlockState) -> AnyQuery | None:
        return self.inner.query(state.inner)

    def update(self, state: BlockState, answer: Any) -> BlockState:
        inner = self.inner.update(state.inner, answer)
        tokens, time, calls = (values.clone() for values in state.before)
        sequences, num_blocks = state.sequences, state.num_blocks[state.sequences]
        tokens[sequences] = tokens[sequences].scatter(1, state.positions, inner.tokens)
        time[sequences] = (num_blocks - state.number - 1 + inner.time.double()) / num_blocks
        calls[sequences] += inner.calls
        state = replace(state, tokens=tokens, time=time, calls=calls, inner=inner)
        return self._next_block(state) if inner.done else state

    def _next_block(self, state: BlockState) -> BlockState:
        number, num_blocks, before = state.number + 1, state.num_blocks, (state.tokens, state.time, state.calls)
        sequences = (num_blocks > number).nonzero()[:, 0]
        if not len(sequences):
            return replace(state, done=True, before=before, inner=None)
        x = replace(state.x, editable=state.block == number)
        positions = _window(x, state.context.max_length)[sequences]
        # Every block has its own seed: in their windows, two blocks may have the same positions, which would then draw
        # the same numbers, and example keys are the caller's. Seeds below 2³² never collide. The first block keeps the
        # seed, so that a text of one block is the same as the inner sampler's.
        view = _view(x, sequences, positions)
        inner = self.inner.start(state.context, view, state.seed + (number << 32))
        return replace(
            state, number=number, sequences=sequences, positions=positions, before=before, inner=inner, done=False
        )


def _blocks(canvas: Batch, size: int, window: int | None) -> Tensor:
    """The number of each position's block, -1 where it is not editable.

    Blocks have `size` positions, or fewer where frozen positions between them would make them wider than the window.
    """
    editable, position = canvas.editable, torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device)
    block = ((editable.cumsum(dim=1) - 1) // size).masked_fill(~editable, -1)
    if window is not None:
        # A block, from its first position to its last, must fit between the ends of the sequence.
        opens = editable & (block != _before(block))
        first = torch.where(opens, position, 0).cummax(dim=1).values
        part = (block * len(position) + (position - first) // (window - 2)).masked_fill(~editable, -1)
        block = ((editable & (part != _before(part))).cumsum(dim=1) - 1).masked_fill(~editable, -1)
    return block


def _before(block: Tensor) -> Tensor:
    """The block of the last editable position before each position; -1 where there is none."""
    latest = block.cummax(dim=1).values
    return torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)


Width = TypeVar("Width", int, Tensor)


def room_before(block: Width, window: int) -> Width:
    """How many positions right before a block of this width a window has, if the sequence is long enough."""
    return 3 * (window - 2 - block) // 4


def _window(x: Batch, max_length: int | None) -> Tensor:
    """The positions of each sequence that the network sees, from left to right; all if the sequence fits."""
    width, length = x.tokens.shape[1], x.attention_mask.sum(dim=1)
    window = width if max_length is None else max_length
    room = window - 2
    position = torch.arange(width, device=length.device).expand_as(x.tokens)
    first = torch.where(x.editable, position, width).amin(dim=1)
    last = torch.where(x.editable, position, 0).amax(dim=1)
    start = first - room_before(last - first + 1, window)
    start = start.clamp(min=1).minimum(length - 1 - room)
    column = position[:, :window]
    run = torch.where(column == 0, 0, start[:, None] + column - 1)
    run = torch.where(column == window - 1, length[:, None] - 1, run)
    return torch.where((length > window)[:, None], run, column)


def _view(x: Batch, sequences: TargetIndices, positions: Tensor) -> Batch:
    """These sequences, reduced to the given positions of each."""
    tokens, attention_mask, editable = (
        values[sequences].gather(1, positions) for values in (x.tokens, x.attention_mask, x.editable)
    )
    return Batch(tokens, attention_mask, editable, x.example[sequences], x.strata[sequences])
