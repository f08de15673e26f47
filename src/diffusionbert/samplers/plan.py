"""Queries planned in advance, so that nothing in the loop waits for the network.

A sampler that knows in advance which positions it will unmask when also knows the shapes of all its queries: which
sequences have a target, how many of their positions are sent, where the targets are. All of this is computed once, on
the CPU, and moved in one copy. On a GPU, the loop then only launches kernels: it never searches for positions or checks
whether a sequence is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    calls: list[dict[str, Any]] = []
    for targets in torch.split(where, sizes):
        sequence = targets // num_positions
        sequences, index = torch.unique_consecutive(sequence, return_inverse=True)
        shown = num_shown[sequences]
        length = int(shown.amax())
        calls.append(
            {
                "length": length,
                "is_padded": bool((shown < length).any()) or bool(is_gapped[sequences].any()),
                "sequences": None if len(sequences) == num_sequences else sequences,
                "positions": index * length + targets % num_positions,
                "where": targets,
            }
        )
    names = ("sequences", "positions", "where")
    given = [(call, name) for call in calls for name in names if call[name] is not None]
    if given:  # one copy for all
        moved = to_device(torch.cat([call[name] for call, name in given]), device)
        parts = torch.split(moved, [len(call[name]) for call, name in given])
        for (call, name), part in zip(given, parts, strict=True):
            call[name] = part
    return tuple(PlannedCall(**call) for call in calls)
