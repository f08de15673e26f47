"""Batch plans: the sequences of every global batch, as a function of the seed and the epoch alone.

Global batches are planned before they are split over accumulation steps and processes, so that any number of processes
sees the same batches, and an epoch and a batch index suffice to resume. This module depends on lengths, not on tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diffusionbert.diffusion.shapes import batch_sizes

Indices = npt.NDArray[np.int64]


class Batching(ABC):
    """The size of global batches."""

    @abstractmethod
    def cut(self, lengths: npt.NDArray[np.integer]) -> list[int]:
        """Returns the sizes of successive batches of sequences with these lengths."""


@dataclass(frozen=True)
class TokenBudget(Batching):
    """As many sequences as fit into a number of tokens, including padding."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens per batch (--batch-tokens) must be >= 1, got {self.tokens}; 4096 is usual")

    def cut(self, lengths: npt.NDArray[np.integer]) -> list[int]:
        """A sequence that exceeds the budget becomes a batch by itself."""
        return batch_sizes(lengths.tolist(), self.tokens)


@dataclass(frozen=True)
class FixedSequences(Batching):
    """A fixed number of sequences, as in the paper; the last batch of a pool may be smaller."""

    sequences: int

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences per batch (--batch-sequences) must be >= 1, got {self.sequences}; 32 is usual")

    def cut(self, lengths: npt.NDArray[np.integer]) -> list[int]:
        full, rest = divmod(len(lengths), self.sequences)
        return [self.sequences] * full + [rest] * (rest > 0)


@dataclass(frozen=True)
class BatchPosition:
    """The next batch of a plan to train on."""

    epoch: int = 0
    batch: int = 0


class BatchPlan:
    """Global batches of sequences with similar lengths.

    An epoch shuffles the sequences, sorts each pool of them by length, cuts the pools into batches and shuffles these.

    Args:
        lengths: The number of tokens of each sequence.
        batching: The size of batches.
        seed: The seed of all shuffles.
        pool: How many sequences are sorted together: more give less padding, fewer give more randomness.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], batching: Batching, seed: int, pool: int = 20_000):
        if not len(lengths):
            raise ValueError("`lengths` must have at least one sequence, got none; give more text")
        self.lengths, self.batching, self.seed, self.pool = lengths, batching, seed, pool

    def epoch(self, epoch: int) -> list[Indices]:
        """The global batches of one epoch, in order, as indices of sequences."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.lengths))
        batches: list[Indices] = []
        for start in range(0, len(order), self.pool):
            pool = order[start : start + self.pool]
            # Ties are in random order; a stable sort keeps it.
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            edges = np.cumsum(self.batching.cut(self.lengths[pool]))[:-1]
            batches += np.split(pool, edges)
        rng.shuffle(batches)
        # Times are stratified by the index in the batch and `parts` takes every n-th: neither may depend on length.
        return [rng.permutation(batch) for batch in batches]

    def following(self, position: BatchPosition) -> Iterator[tuple[BatchPosition, Indices]]:
        """Yields the batches from a position on, endlessly, each with the position after it."""
        epoch, skip = position.epoch, position.batch
        while True:
            batches = self.epoch(epoch)
            for index in range(skip, len(batches)):
                yield BatchPosition(epoch, index + 1), batches[index]
            epoch, skip = epoch + 1, 0

    def positions(self, epoch: int = 0) -> list[int]:
        """The number of positions of each batch of an epoch, including padding."""
        return [len(batch) * int(self.lengths[batch].max()) for batch in self.epoch(epoch)]


def parts(indices: Sequence[int] | Indices, count: int) -> list[Indices]:
    """Splits a global batch into `count` parts whose sizes differ by at most 1; parts may be empty."""
    return [np.asarray(indices, dtype=np.int64)[part::count] for part in range(count)]
