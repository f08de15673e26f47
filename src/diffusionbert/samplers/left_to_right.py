"""Radford et al. 2019 (GPT-2), section 2: one word after another, each given those before it.

    x_i ~ p(v | x_1 … x_{i-1})        shaped, at the editable places i from left to right

The network keeps what it has read (Vaswani et al. 2017's decoder with a cache of keys and values), so a place is read
once. Frozen places are read as they are, together with what is written before the next editable place, however
many there are; what is frozen behind the last editable place is never read. So a row is asked once for each word that
is written, and each time it costs one place and not the row.

The row's end is given by the canvas: writing never stops of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks.causal import CausalNetwork, Reader
from diffusionbert.noise import Noise, Purpose
from diffusionbert.shapes import Batch, PerAsked, Tokens


@final
class LeftToRight(Sampler[CausalNetwork]):
    """Writes a word a round, at the same place of all rows; rows that are written are let go.

    A row's time is the share of its editable places that are still to be written.
    """

    def __init__(self, mask_id: int, shaping: Shaping | None = None):
        super().__init__()
        self.mask_id = mask_id
        self.shaping = shaping or Shaping()

    def sample(self, network: CausalNetwork, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the canvas with everything hidden, and then the state after every place that some row writes."""
        editable = canvas.editable
        if bool(editable[:, 0].any()):
            raise ValueError(
                "the first place of a row is to be written, but a decoder writes after what stands before: "
                "let rows begin with a token that is not editable, such as [CLS]"
            )
        # A place is written once, so one number each is enough for its word.
        uniform = Noise(seed).per_place(canvas, Purpose.WRITE)
        tokens, calls = canvas.tokens.masked_fill(editable, self.mask_id), torch.zeros_like(canvas.example)
        yield State(tokens, canvas.share_of(editable), calls)
        reader, start = network.begin(), 0
        rows, places = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        for place in editable.any(dim=0).nonzero()[:, 0].tolist():
            is_left = editable[rows, place:].any(dim=1)
            if not bool(is_left.all()):
                rows = rows[is_left]
                if start:  # before, there is nothing to keep
                    reader.keep(is_left.nonzero()[:, 0])
            due = editable[rows, place]
            words = self._next(reader, tokens[rows, start:place], due, uniform[rows, place])
            tokens, calls, start = tokens.clone(), calls + editable[:, place], place
            tokens[rows[due], place] = words
            yield State(tokens, canvas.share_of(editable & (places > place)), calls)

    @torch.no_grad()
    def _next(self, reader: Reader, tokens: Tokens, due: Tensor, uniform: PerAsked) -> Tensor:
        """Reads on, and draws a word for each row that is to have one."""
        log_p = reader.read(tokens)
        return draw(self.shaping(log_p[due]), uniform[due])
