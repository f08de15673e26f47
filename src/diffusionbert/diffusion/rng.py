"""Random numbers that belong to an example and a step, not to a batch position, a process or a device.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a function from a key
and a counter to random bits. The key is the seed; the counter names the example, the step, the purpose and
the place. So one process and eight see the same noise, a batch equals its rows one by one, and a resumed run
continues with no generator state to restore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import (
    Batch,
    Counts,
    Keys,
    PerPosition,
    PositionMask,
    Times,
    Values,
)
from diffusionbert.reporting import require_type

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Gives four 32-bit words (in int64) for each four-word counter; counters broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, which keeps exactly the bits we read.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


class Purpose(IntEnum):
    """What a number is drawn for; two purposes never share a number."""

    TIME = 0
    CORRUPT = 1
    REPLACE = 2
    ORDER = 3
    SAMPLE = 4
    GAUSS = 5
    KEEP = 6
    TURN = 7
    UNMASK = 8
    REMASK = 9
    PLACEMENT = 11
    LENGTH = 12
    UNROLL = 13
    PAIR = 14


@dataclass(frozen=True)
class Noise:
    """The random numbers of one step (of training, of a sampler, of an estimate) under one seed."""

    seed: int
    step: int | Keys = 0
    """One for all examples, or one for each: then one call draws for many steps."""

    def __post_init__(self) -> None:
        require_type("seed", self.seed, Integral, "a whole number")

    def uniform(self, example: Keys, purpose: Purpose, *shape: int) -> Values:
        """Draws float64 numbers from the open interval (0, 1), a block of the given shape for each example."""
        count = math.prod(shape)
        blocks = torch.arange((count + 1) // 2, device=example.device)
        example = example.long()[:, None]
        steps = torch.as_tensor(self.step, device=example.device).reshape(-1, 1)
        words = philox(
            (
                blocks,
                example & _MASK32,
                steps & _MASK32,
                ((example >> 32) << 8) | int(purpose),
            ),
            (self.seed & _MASK32, (self.seed >> 32) & _MASK32),
        )
        # 52 random bits and a half: never 0, never 1, and exact in float64.
        pairs = [(((high << 32 | low) >> 12) & ((1 << 52) - 1)) for high, low in (words[:2], words[2:])]
        bits = torch.stack(pairs, dim=-1).flatten(1)[:, :count]
        return ((bits.double() + 0.5) * 2.0**-52).reshape(len(example), *shape)

    def stratified_uniform(self, batch: Batch) -> Times:
        """Draws one number in [0, 1) per sequence, from the stratum of that sequence."""
        low, high = batch.strata.unbind(dim=1)
        return (low + (high - low) * self.uniform(batch.example, Purpose.TIME)) % 1

    def stratify(self, batch: Batch) -> Batch:
        """Gives each of B rows its own slice of (0, 1), of length 1/B, so that the slices tile it.

        All slices are turned by one random number, so that over many steps each row draws from everywhere:
        its estimates stay unbiased, whatever the order of rows.
        """
        sequences, device = len(batch.tokens), batch.tokens.device
        turn = self.uniform(torch.zeros(1, dtype=torch.long, device=device), Purpose.TURN)
        edges = torch.arange(sequences + 1, dtype=torch.float64, device=device) / max(sequences, 1) + turn
        return replace(batch, strata=torch.stack([edges[:-1], edges[1:]], dim=1))

    def per_position(self, batch: Batch, purpose: Purpose) -> PerPosition:
        """Draws one number from (0, 1) for each place of each row."""
        return self.uniform(batch.example, purpose, batch.tokens.shape[1])

    def chosen(self, batch: Batch, number: Counts) -> PositionMask:
        """So many editable places of each row, every set of them alike."""
        order = self.per_position(batch, Purpose.ORDER).masked_fill(~batch.editable, torch.inf)
        return batch.editable & (order.argsort(dim=1).argsort(dim=1) < number[:, None])

    def normal(self, example: Keys, purpose: Purpose, *shape: int) -> Values:
        """Draws float64 standard normal numbers, a block of the given shape for each example."""
        # The inverse of the distribution function: one number each, no pairs to keep together.
        numbers: Tensor = torch.special.ndtri(self.uniform(example, purpose, *shape))
        return numbers
