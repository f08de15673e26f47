"""Queries planned in advance, so that nothing in the loop waits for the network.

A sampler that knows in advance which positions it will unmask when also knows the shapes of all its queries: which
sequences have a target, how many of their positions are sent, where the targets are. All of this is computed once, on
the CPU, and moved in one copy. On a GPU, the loop then only launches kernels: it never searches for positions or checks
whether a sequence is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import Counts, PositionMask, TargetIndices, Times, Tokens, to_device
from diffusionbert.samplers.base import Query


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """One query: its sequences and targets."""

    sequences: Counts | None  # indices of the sequences that have a target; None if all do
    length: int  # how many positions of each are sent: up to the last one that any of them attends to
    is_padded: bool  # whether some of these positions are padding
    positions: TargetIndices  # the targets, as indices into the flattened sequences that are sent
    where: TargetIndices  # the targets, as indices into the flattened batch

    def query(self, tokens: Tokens, attention_mask: PositionMask, t: Times) -> Query:
        """The query about sequences [B, L] at their times [B]."""
        shown = [values[:, : self.length] for values in (tokens, attention_mask)]
        if self.sequences is not None:
            *shown, t = (values.index_select(0, self.sequences) for values in (*shown, t))
        return Query(shown[0], shown[1], t, positions=self.positions, is_padded=self.is_padded)


def plan_calls(number: Tensor, attention_mask: PositionMask, device: torch.device) -> tuple[PlannedCall, ...]:
    """Plans calls from the number of the call in which each position is a target.

    Args:
        number: [B, L], on the CPU: the number 0, 1, … of each position's call; -1 if it is never a target.
        attention_mask: [B, L], on the CPU.
        device: Where the sequences are.

    Returns:
        One call per number, up to the largest; none of the numbers may be missing.
    """
    where = (number.flatten() >= 0).nonzero()[:, 0]
    where = where[number.flatten()[where].argsort(stable=True)]  # by call, then by sequence and position
    sizes = torch.bincount(number.flatten()[where]).tolist() if len(where) else []
    return plan_targets(where, sizes, attention_mask, device)


def plan_targets(
    where: TargetIndices, sizes: list[int], attention_mask: PositionMask, device: torch.device
) -> tuple[PlannedCall, ...]:
    """Plans calls from their targets.

    Args:
        where: Targets on the CPU, call by call: indices into the flattened batch, in order within a call.
        sizes: The number of targets of each call, at least one.
        attention_mask: [B, L], on the CPU.
        device: Where the sequences are.
    """
    num_sequences, num_positions = attention_mask.shape
    last = torch.arange(1, num_positions + 1, device=where.device) * attention_mask
    num_shown = last.amax(dim=1)  # of each sequence
    is_gapped = attention_mask.sum(dim=1) < num_shown
    # For all calls at once: their sequences, one after another, and where each target is among those of its call.
    sequence, size = where // num_positions, torch.tensor(sizes, dtype=torch.long, device=where.device)
    call = torch.arange(len(sizes), device=where.device).repeat_interleave(size)
    (call_of, sequences), index = _unique_pairs(call, sequence)
    num_own = torch.bincount(call_of, minlength=len(sizes))
    row = index - (num_own.cumsum(dim=0) - num_own)[call]
    length = torch.zeros_like(size).scatter_reduce(0, call_of, num_shown[sequences], "amax")
    is_padding = (num_shown[sequences] < length[call_of]) | is_gapped[sequences]
    is_padded = torch.bincount(call_of[is_padding], minlength=len(sizes)) > 0
    positions = row * length[call] + where % num_positions
    moved = to_device(torch.cat([sequences, positions, where]), device)  # one copy for all
    counts = num_own.tolist(), sizes, sizes
    sent, positions_of, where_of = (
        torch.split(part, own) for part, own in zip(torch.split(moved, list(map(sum, counts))), counts, strict=True)
    )
    shapes = zip(length.tolist(), is_padded.tolist(), strict=True)
    return tuple(
        PlannedCall(None if len(own) == num_sequences else own, *shape, *targets)
        for own, shape, *targets in zip(sent, shapes, positions_of, where_of, strict=True)
    )


def _unique_pairs(first: Tensor, second: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct pairs of two sorted columns, and the index of each row's pair."""
    is_new = torch.ones_like(first, dtype=torch.bool)
    is_new[1:] = (first.diff() != 0) | (second.diff() != 0)
    return (first[is_new], second[is_new]), is_new.cumsum(dim=0) - 1
