"""Forward passes in a few fixed shapes, so that what is computed for a sequence does not depend on its company.

A sequence is padded to a length that follows from its own, and passes have 1, 2, 4, … sequences. In a pass of one
shape, the numbers of a sequence do not depend on the others or on its index. Between shapes they may, where libraries
choose other kernels (a matrix of one row is multiplied differently); so a shape is used only if it is found to give
the same bits as the largest one. Where none does, all passes have the largest shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import PositionMask, TargetLogProbs, Targets, TargetVectors, Times, Tokens
from diffusionbert.networks.masked import Denoiser

SHORTEST = 16
"""The positions of the shortest shape; the others are 3/2 and 2 times a power of two of it."""
ROWS = {"cpu": 32, "cuda": 128}
"""The most sequences of a pass, by device."""
POSITIONS = {"cpu": 1024, "cuda": 65536}
"""The most positions of a pass, padding included."""
TARGETS = (4, 16, 64)
"""At how many target positions the head is computed at once."""
_PROBES = 8
"""The positions of each sequence at which two shapes are compared."""


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence without padding, what is asked about it, and whom."""

    tokens: Tensor
    """[n]"""
    t: Tensor
    """A number."""
    targets: Tensor | None
    """[n]: at which positions log-probabilities are asked for; None asks for the hidden states of all."""
    shapes: FixedShapes


@dataclass(frozen=True, eq=False)
class FixedShapes:
    """A masked network that is called in fixed shapes."""

    network: Denoiser
    pad_id: int
    _rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _targets: list[int] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.network.allowed.device

    def length_of(self, num_positions: int) -> int:
        """The positions to which a sequence is padded."""
        length = SHORTEST
        while length < num_positions:
            length = length * 3 // 2 if length.bit_count() == 1 else length * 4 // 3
        return max(num_positions, min(length, self.network.max_length))

    def most_rows(self, length: int) -> int:
        """The most sequences of a pass with so many positions; a power of two."""
        kind = self.device.type if self.device.type in ROWS else "cpu"
        return min(ROWS[kind], 1 << (max(1, POSITIONS[kind] // length).bit_length() - 1))

    def rows_for(self, length: int, waiting: int) -> int:
        """The number of sequences of the next pass if so many wait, padding included."""
        known = self.usable_rows(length)
        enough = next((rows for rows in known if rows >= waiting), known[-1])
        filled = max((rows for rows in known if rows <= waiting), default=0)
        return enough if 4 * waiting >= 3 * enough or not filled else filled  # at most a quarter is padding

    def warm_up(self, most: int) -> None:
        """Finds the shapes of sequences up to a length, before the first one is waited for."""
        length = self.length_of(1)
        while length <= min(most, self.network.max_length):
            self.usable_rows(length)
            length = self.length_of(length + 1)

    # ---- passes -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, rows: Sequence[Row], length: int, num_rows: int) -> list[Tensor]:
        """The answer about each of at most `num_rows` sequences: log-probabilities [N, V] or hidden states [n, D]."""
        tokens, mask = self._empty(num_rows, length)
        targets = torch.zeros_like(mask)
        t = torch.zeros(num_rows, dtype=torch.float64, device=self.device)
        for index, row in enumerate(rows):
            size = len(row.tokens)
            tokens[index, :size], mask[index, :size], t[index] = row.tokens, True, row.t
            if row.targets is not None:
                targets[index, :size] = row.targets
        if rows[0].targets is None:
            hidden = self.network.hidden_states(tokens, mask, t)
            return [hidden[index, : len(row.tokens)] for index, row in enumerate(rows)]
        counts = targets.sum(dim=1).tolist()[: len(rows)]
        log_f = self.log_probs(self.network.hidden_at(tokens, mask, t, Targets.of(targets).positions))
        return list(torch.split(log_f, counts))

    def log_probs(self, hidden: TargetVectors) -> TargetLogProbs:
        """The head, in fixed shapes."""
        parts = []
        for start in range(0, len(hidden), TARGETS[-1]):
            part = hidden[start : start + TARGETS[-1]]
            size = next(size for size in self.usable_targets(hidden) if size >= len(part))
            padded = torch.cat([part, part.new_zeros(size - len(part), part.shape[1])])
            parts.append(self.network.log_probs(padded)[: len(part)])
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def _empty(self, num_rows: int, length: int) -> tuple[Tokens, PositionMask]:
        """Padding, of which one position is attended to, because attention to nothing is not a number."""
        tokens = torch.full((num_rows, length), self.pad_id, device=self.device)
        mask = torch.zeros(num_rows, length, dtype=torch.bool, device=self.device)
        mask[:, 0] = True
        return tokens, mask

    # ---- shapes that give the same bits -----------------------------------------------------------------------------

    def usable_rows(self, length: int) -> tuple[int, ...]:
        """The numbers of sequences, rising, whose passes give the same bits; tried out once per length."""
        if length not in self._rows:
            most = self.most_rows(length)
            tokens, t = self._random_tokens(most, length)
            probes = torch.zeros(most, length, dtype=torch.bool, device=self.device)
            probes[:, :: max(1, length // _PROBES)] = True

            def hidden(rows: int) -> Tensor:
                mask = torch.ones_like(probes[:rows])
                mask[1::2, length * 3 // 4 :] = False
                return self.network.hidden_at(tokens[:rows], mask, t[:rows], Targets.of(probes[:rows]).positions)

            sizes = [1 << power for power in range(most.bit_length())]
            self._rows[length] = tuple(_agreeing(sizes, hidden))
        return self._rows[length]

    def usable_targets(self, like: TargetVectors) -> list[int]:
        """The numbers of target positions, rising, for which the head gives the same bits; tried out once."""
        if not self._targets:
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(TARGETS[-1], like.shape[1], generator=generator).to(like)
            self._targets.extend(_agreeing(TARGETS, lambda size: self.network.log_probs(hidden[:size])))
        return self._targets

    def _random_tokens(self, num_rows: int, length: int) -> tuple[Tokens, Times]:
        generator = torch.Generator().manual_seed(0)
        allowed = self.network.allowed.nonzero()[:, 0].cpu()
        chosen = allowed[torch.randint(len(allowed), (num_rows, length), generator=generator)]
        return chosen.to(self.device), torch.rand(num_rows, dtype=torch.float64, generator=generator).to(self.device)


@torch.no_grad()
def _agreeing(sizes: Sequence[int], compute: Callable[[int], Tensor]) -> list[int]:
    """The sizes whose results begin as those of the largest, to the bit."""
    reference = compute(sizes[-1])
    found = [size for size in sizes[:-1] if _begins(reference, compute(size))]
    return [*found, sizes[-1]]


def _begins(whole: Tensor, part: Tensor) -> bool:
    return torch.equal(whole[: len(part)], part)
