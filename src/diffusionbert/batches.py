"""Which sentences make up which batch, as a function of the seed and the epoch alone.

Global batches are planned here, before they are split over steps and processes, so that one process and eight
see the same ones, and a resumed run finds its place from two numbers. Knows lengths, not tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Batching(ABC):
    """How large a global batch is."""

    @abstractmethod
    def cut(self, lengths: npt.NDArray[np.integer]) -> list[int]:
        """Gives the sizes of successive batches over rows of these lengths."""


@dataclass(frozen=True)
class TokenBudget(Batching):
    """As many rows as fit into a number of tokens, padding counted."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a batch cannot have {self.tokens} tokens (--batch-tokens); give 1 or more, such as 4096")

    def cut(self, lengths: npt.NDArray[np.integer]) -> list[int]:
        """A row longer than the whole budget gets a batch of its own."""
        sizes, rows, longest = [], 0, 0
        for length in lengths.tolist():
            longest = max(longest, length)
            if rows and longest * (rows + 1) > self.tokens:
                sizes.append(rows)
                rows, longest = 0, length
            rows += 1
        return [*sizes, rows] if rows else sizes


@dataclass(frozen=True)
class FixedRows(Batching):
    """Always the same number of sentences, as the paper has it; the last batch of an epoch may be smaller."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a batch cannot have {self.rows} sentences (--batch-rows); give 1 or more, such as 32")

    def cut(self, lengths: npt.NDArray[np.integer]) -> list[int]:
        """Equal parts, and the rest."""
        full, rest = divmod(len(lengths), self.rows)
        return [self.rows] * full + [rest] * (rest > 0)


@dataclass(frozen=True)
class Position:
    """Where in the plan a run stands: the next batch to be trained on."""

    epoch: int = 0
    batch: int = 0


class BatchPlan:
    """Shuffles sentences, sorts pools of them by length, cuts the pools into batches and shuffles those."""

    def __init__(self, lengths: npt.NDArray[np.integer], batching: Batching, seed: int, pool: int = 20_000):
        """`pool` sentences are sorted together: more give less padding, fewer more chance."""
        if not len(lengths):
            raise ValueError("there are no sentences to make batches of")
        self.lengths, self.batching, self.seed, self.pool = lengths, batching, seed, pool

    def epoch(self, epoch: int) -> list[Indices]:
        """All global batches of one pass over the corpus, in order."""
        chance = np.random.default_rng([self.seed, epoch])
        order = chance.permutation(len(self.lengths))
        batches: list[Indices] = []
        for start in range(0, len(order), self.pool):
            rows = order[start : start + self.pool]
            # Ties are in random order already; a stable sort keeps it.
            rows = rows[np.argsort(self.lengths[rows], kind="stable")]
            edges = np.cumsum(self.batching.cut(self.lengths[rows]))[:-1]
            batches += np.split(rows, edges)
        chance.shuffle(batches)
        # Neighbouring rows draw neighbouring times, and parts take every n-th row: neither may follow the length.
        return [chance.permutation(batch) for batch in batches]

    def following(self, position: Position) -> Iterator[tuple[Position, Indices]]:
        """All batches from a position on, without end, each with the position after it."""
        epoch, skip = position.epoch, position.batch
        while True:
            batches = self.epoch(epoch)
            for index in range(skip, len(batches)):
                yield Position(epoch, index + 1), batches[index]
            epoch, skip = epoch + 1, 0

    def places(self, epoch: int = 0) -> list[int]:
        """The number of places of each batch of an epoch, padding counted."""
        return [len(batch) * int(self.lengths[batch].max()) for batch in self.epoch(epoch)]

    def padding(self, epoch: int = 0) -> float:
        """The share of places in an epoch's batches that are padding."""
        return 1 - float(self.lengths.sum()) / sum(self.places(epoch))


def parts(rows: Sequence[int] | Indices, count: int) -> list[Indices]:
    """Splits a global batch into so many parts, as evenly as can be; with fewer rows than parts, some are empty."""
    return [np.asarray(rows, dtype=np.int64)[part::count] for part in range(count)]
