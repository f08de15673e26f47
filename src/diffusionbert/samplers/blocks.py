"""Nie et al. 2025, "Large language diffusion models" (LLaDA), section 2.4: block by block, from left to right.

The editable places of a row are cut into consecutive blocks. Another sampler writes one block after the other, with
only that block editable: what comes before is frozen, what comes after is `[MASK]`. For text longer than the network
reads, a window of the row is shown. It knows nothing of how a block is written.

The window of a row longer than it: the row's first place (`[CLS]`), the row's last (`[SEP]`) and, between them, one
run of places around the block. Of the room that the block leaves, three quarters lie before it, where text is, and
one quarter after it, where mostly masks are; at either end of the row the run is pushed inside. A row that fits is
shown whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network
from diffusionbert.shapes import Batch


class Blocks(Sampler[Network]):
    """Lets another sampler write block after block.

    A network that wants a time is told the inner sampler's, that of the block. A row's own time is that of its
    blocks together: with b of them left and the next at time t, (b - 1 + t) out of all.
    """

    def __init__(self, inner: Sampler[Network], size: int, mask_id: int, window: int | None = None):
        """`size` is the most editable places a block has, `window` the most places that the network sees."""
        super().__init__()
        if size < 1:
            raise ValueError(f"a block must have at least 1 place, given {size}; 32 is usual")
        if window is not None and window < size + 2:
            raise ValueError(
                f"a window of {window} places cannot hold a block of {size} with the row's first place and its last; "
                f"use at least {size + 2}, or smaller blocks"
            )
        self.inner = inner
        self.size = size
        self.mask_id = mask_id
        self.window = window

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the canvas with everything hidden, and then every state of every block."""
        block = self._blocked(canvas)
        num_blocks = block.amax(dim=1) + 1
        tokens = canvas.tokens.masked_fill(canvas.editable, self.mask_id)
        time, calls = (num_blocks > 0).double(), torch.zeros_like(canvas.example)
        yield State(tokens, time, calls)
        for number in range(max(num_blocks.tolist(), default=0)):
            rows = (num_blocks > number).nonzero()[:, 0]  # the others are done
            x = replace(canvas, tokens=tokens, editable=block == number)
            places = self._shown(x)[rows]
            left = num_blocks[rows] - number - 1
            before = tokens, time, calls
            # Blocks differ by seed: in a window two of them may stand at the same places, which would then draw the
            # same numbers, and the examples' names are not ours to change. Seeds below 2³² stay apart; the first
            # block keeps the seed, so that a text of one block is the inner sampler's own.
            states = self.inner.sample(network, _view(x, rows, places), seed + (number << 32))
            for state in itertools.islice(states, 1, None):  # its first is where we are
                tokens, time, calls = (values.clone() for values in before)
                tokens[rows] = tokens[rows].scatter(1, places, state.tokens)
                time[rows] = (left + state.time.double()) / num_blocks[rows]
                calls[rows] += state.calls
                yield State(tokens, time, calls)

    def _blocked(self, canvas: Batch) -> Tensor:
        """The number of each place's block, -1 where it is not editable.

        Blocks have `size` places, or fewer where frozen places between them would make them too wide for the window.
        """
        editable, place = canvas.editable, torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device)
        block = ((editable.cumsum(dim=1) - 1) // self.size).masked_fill(~editable, -1)
        if self.window is not None:
            # A block's own places, counted from its first one, must fit between the row's first place and its last.
            opens = editable & (block != _before(block))
            first = torch.where(opens, place, 0).cummax(dim=1).values
            part = (block * len(place) + (place - first) // (self.window - 2)).masked_fill(~editable, -1)
            block = ((editable & (part != _before(part))).cumsum(dim=1) - 1).masked_fill(~editable, -1)
        return block

    def _shown(self, x: Batch) -> Tensor:
        """The places that the network sees of each row, from left to right; rows that fit are shown whole."""
        width, length = x.tokens.shape[1], x.attend.sum(dim=1)
        window = width if self.window is None else self.window
        room = window - 2
        place = torch.arange(width, device=length.device).expand_as(x.tokens)
        first = torch.where(x.editable, place, width).amin(dim=1)
        last = torch.where(x.editable, place, 0).amax(dim=1)
        start = first - 3 * (room - (last - first + 1)) // 4
        start = start.clamp(min=1).minimum(length - 1 - room)
        column = place[:, :window]
        run = torch.where(column == 0, 0, start[:, None] + column - 1)
        run = torch.where(column == window - 1, length[:, None] - 1, run)
        return torch.where((length > window)[:, None], run, column)


def _view(x: Batch, rows: Tensor, places: Tensor) -> Batch:
    """Some rows, and of each some places."""
    tokens, attend, editable = (values[rows].gather(1, places) for values in (x.tokens, x.attend, x.editable))
    return Batch(tokens, attend, editable, x.example[rows], x.strata[rows])


def _before(block: Tensor) -> Tensor:
    """The block of the last editable place before each place; -1 where there is none."""
    latest = block.cummax(dim=1).values
    return torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)
