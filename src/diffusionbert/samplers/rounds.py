"""What samplers share that choose themselves how many positions are unmasked in each round."""

from __future__ import annotations

from diffusionbert.samplers.base import SamplingContext
from diffusionbert.shapes import Batch, RowCounts, RowTimes


def masked_share(context: SamplingContext, x: Batch) -> RowTimes:
    """The time that a network is given: the masked share of the editable positions, times the start time."""
    return context.start_time * x.share_of(x.tokens == context.mask_id)


def due_after(number: int, num_positions: RowCounts, num_rounds: int) -> RowCounts:
    """How many of n positions are unmasked after round k = 0, 1, …: ⌊(k + 1)·n / m⌋, m the lesser of n and rounds."""
    due: RowCounts = (number + 1) * num_positions // num_positions.clamp(min=1, max=num_rounds)
    return due
