"""Batch plans: the sequences of every global batch, as a function of the seed and the epoch alone.

Global batches are planned before they are split over accumulation steps and processes, so any number of processes sees
the same batches, and an epoch and a batch index are enough to resume. This module sees lengths, not tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from diffusionbert.diffusion.shapes import Batch, batch_sizes

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenBudget:
    """As many sequences as fit into a given number of tokens, including padding unless they are packed."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens per batch (--batch-tokens) must be >= 1, got {self.tokens}; 4096 is usual")

    def num_sequences(self, lengths: npt.NDArray[np.integer]) -> int:
        """The number of sequences in a batch without padding."""
        return math.ceil(self.tokens * len(lengths) / max(1, int(lengths.sum())))

    def cut(self, lengths: npt.NDArray[np.integer], *, packed: bool = False) -> list[int]:
        """The sizes of successive batches; a sequence that exceeds the budget becomes a batch by itself."""
        if not packed:
            return batch_sizes(lengths.tolist(), self.tokens)
        ends, sizes, start = np.cumsum(lengths), [], 0
        while start < len(lengths):
            before = ends[start] - lengths[start]
            end = max(start + 1, int(np.searchsorted(ends, before + self.tokens, side="right")))
            sizes.append(end - start)
            start = end
        return sizes


@dataclass(frozen=True)
class FixedSequences:
    """A fixed number of sequences, as in the paper; the last batch of a pool may be smaller."""

    sequences: int

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences per batch (--batch-sequences) must be >= 1, got {self.sequences}; 32 is usual")

    def num_sequences(self, lengths: npt.NDArray[np.integer]) -> int:
        """The number of sequences in a batch."""
        return self.sequences

    def cut(self, lengths: npt.NDArray[np.integer], *, packed: bool = False) -> list[int]:
        full, rest = divmod(len(lengths), self.sequences)
        return [self.sequences] * full + [rest] * (rest > 0)


@dataclass(frozen=True)
class BatchPosition:
    """The next batch of a plan to train on."""

    epoch: int = 0
    batch: int = 0


class BatchPlan:
    """Global batches.

    An epoch shuffles the sequences, sorts each pool of them by length, cuts the pools into batches and shuffles these.
    Packed sequences are not sorted: rows are filled best by different lengths, and there is no padding to avoid.

    Args:
        lengths: The number of tokens of each sequence.
        batching: The size of batches.
        seed: The seed of all shuffles.
        packed: Whether sequences will be packed.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer],
        batching: TokenBudget | FixedSequences,
        seed: int,
        *,
        packed: bool = False,
    ):
        self.lengths, self.batching, self.seed, self.packed = lengths, batching, seed, packed
        # How many sequences are sorted together: more give less padding, fewer give more randomness.
        self.pool = len(lengths) if packed else max(20_000, 100 * batching.num_sequences(lengths))

    def epoch(self, epoch: int) -> list[Indices]:
        """The global batches of one epoch, in order, as indices of sequences."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.lengths))
        batches: list[Indices] = []
        for start in range(0, len(order), self.pool):
            pool = order[start : start + self.pool]
            if not self.packed:
                # A stable sort keeps ties in random order.
                pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            edges = np.cumsum(self.batching.cut(self.lengths[pool], packed=self.packed))[:-1]
            batches += np.split(pool, edges)
        rng.shuffle(batches)
        # Times are stratified by index, and micro-batches take every n-th sequence: neither may depend on length.
        return [rng.permutation(batch) for batch in batches]

    def following(self, position: BatchPosition) -> Iterator[tuple[BatchPosition, Indices]]:
        """Yields batches endlessly, starting at a position, each with the position after it."""
        epoch, skip = position.epoch, position.batch
        while True:
            batches = self.epoch(epoch)
            for index in range(skip, len(batches)):
                yield BatchPosition(epoch, index + 1), batches[index]
            epoch, skip = epoch + 1, 0

    def positions(self) -> list[int]:
        """The number of positions in each batch of the first epoch, including padding unless packed."""
        if self.packed:
            return [int(self.lengths[batch].sum()) for batch in self.epoch(0)]
        return [len(batch) * int(self.lengths[batch].max()) for batch in self.epoch(0)]


def micro_batches(
    batch: Batch, num_processes: int, process: int, micro_tokens: int | None, *, packed: bool = False
) -> list[Batch]:
    """One process's share of a global batch, in parts of at most `micro_tokens` tokens (about as many, if packed)."""
    num_sequences = len(batch.tokens)
    num_positions = int(batch.attention_mask.sum()) if packed else batch.tokens.numel()
    sequences_at_once = max(1, (micro_tokens or num_positions) * num_sequences // max(1, num_positions))
    count = max(1, math.ceil(num_sequences / (num_processes * sequences_at_once)))
    shares = [torch.arange(num_sequences)[part :: num_processes * count] for part in range(num_processes * count)]
    # A process without sequences must still exchange gradients: it gets one with nothing editable.
    idle = without_targets(batch.select(torch.tensor([0])))
    return [batch.select(share) if len(share) else idle for share in shares[process::num_processes]]


def without_targets(batch: Batch) -> Batch:
    """The batch without editable positions, so that its loss and gradients are 0."""
    return replace(batch, editable=torch.zeros_like(batch.editable))
