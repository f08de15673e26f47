"""What samplers share that choose themselves how many positions are unmasked in each round."""

from __future__ import annotations

from diffusionbert.diffusion.shapes import Batch, Counts, Times
from diffusionbert.samplers.base import SamplingContext


def masked_share(context: SamplingContext, x: Batch) -> Times:
    """The time that a network is given: the masked share of the editable positions, times the start time."""
    return context.start_time * x.fraction_of(x.tokens == context.mask_id)


def due_after(number: int, num_positions: Counts, num_rounds: int) -> Counts:
    """How many of n positions are unmasked after round k = 0, 1, …: ⌊(k + 1)·n / m⌋, m the lesser of n and rounds."""
    due: Counts = (number + 1) * num_positions // num_positions.clamp(min=1, max=num_rounds)
    return due
