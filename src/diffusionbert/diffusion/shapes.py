"""The axes, the tensor types and the batch: the words every other module speaks.

Axes, everywhere in the package:

    B  rows of a batch          V  vocabulary
    L  places in a row          D  width of a vector
    N  places that are asked about, those of all rows one after another (row-major)
    T  number of steps

Time is a fraction: `0.0` is clean text, `1.0` is pure noise, step k of T is `k / T`. A step is an interval
`(s, t)` with `0 <= s < t <= 1`, so that full steps, strides and continuous time are one code path.

This module knows nothing of noise, networks or text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:  # a GPU machine may have torch alone; the shapes are then comments

        class _Unchecked:
            def __class_getitem__(cls, _: Any) -> type[Tensor]:
                return Tensor

        Bool = Float = Int = _Unchecked

Tokens = Int[Tensor, "B L"]
PositionMask = Bool[Tensor, "B L"]
Times = Float[Tensor, "B"]
PerSequence = Float[Tensor, "B"]
Keys = Int[Tensor, "B"]
Counts = Int[Tensor, "B"]
Flags = Bool[Tensor, "B"]
Strata = Float[Tensor, "B 2"]
PerPosition = Float[Tensor, "B L"]
Vectors = Float[Tensor, "B L D"]
PerTarget = Float[Tensor, "N"]
TargetVectors = Float[Tensor, "N D"]
TargetTokens = Int[Tensor, "N"]
TargetIndices = Int[Tensor, "N"]
TargetLogProbs = Float[Tensor, "N V"]
PerToken = Float[Tensor, "V"]
TokenSet = Bool[Tensor, "V"]
Grid = Float[Tensor, "steps"]
Values = Float[Tensor, "..."]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentences, or canvases to be written on, side by side.

    `editable` is the one mask that tells tasks apart: the process may hide or write exactly these places.
    `[CLS]`, `[SEP]`, padding, a prompt and a source sentence are not editable.
    """

    tokens: Tokens
    attend: PositionMask
    """PositionMask the network looks at: all but padding, which stands at the end of a row."""
    editable: PositionMask
    example: Keys
    """Names each row; its random numbers depend on this name and not on where in which batch the row is."""
    strata: Strata
    """The slice of (0, 1) from which a row draws its time, beyond 1 going on from 0; see `Noise.stratify`."""

    @classmethod
    def of(cls, tokens: Tokens, editable: PositionMask, attend: PositionMask | None = None) -> Batch:
        """Makes a batch whose rows are examples 0, 1, …, each drawing its time from all of (0, 1).

        Two batches made so draw the same noise; give their rows other names where that matters.
        """
        sequences, device = tokens.shape[0], tokens.device
        return cls(
            tokens,
            torch.ones_like(editable) if attend is None else attend,
            editable,
            torch.arange(sequences, device=device),
            torch.tensor([0.0, 1.0], dtype=torch.float64, device=device).expand(sequences, 2),
        )

    @property
    def num_tokens(self) -> Tensor:
        """The number of editable tokens: what losses are divided by, summed over the global batch."""
        return self.editable.sum()

    def constant_times(self, time: float) -> Times:
        """One time for all rows."""
        return torch.full((len(self.tokens),), time, dtype=torch.float64, device=self.tokens.device)

    def fraction_of(self, positions: PositionMask) -> Times:
        """What share of each row's editable places is marked; 0 where nothing is editable."""
        share: Times = (positions & self.editable).sum(dim=1).double() / self.editable.sum(dim=1).clamp(min=1)
        return share

    def select(self, index: Tensor) -> Batch:
        """Picks rows, cut after the last place that any of them attends to."""
        length = int(self.attend[index].any(dim=0).nonzero().max()) + 1 if len(index) else 0
        return Batch(
            self.tokens[index, :length],
            self.attend[index, :length],
            self.editable[index, :length],
            self.example[index],
            self.strata[index],
        )

    def to(self, device: torch.device | str) -> Batch:
        """Moves every tensor to a device."""
        return Batch(*(_moved(getattr(self, field.name), torch.device(device)) for field in fields(self)))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # From pageable memory a copy to a GPU would wait for all the work that the GPU has been given before.
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.contiguous().pin_memory() if is_upload else tensor).to(device, non_blocking=is_upload)


def exact_bits(values: Tensor) -> Tensor:
    """Numbers as int64, for a module's buffer: it moves with the module, but no `half()` or `bfloat16()` rounds it."""
    return values.double().contiguous().view(torch.int64)


def from_bits(bits: Tensor) -> Tensor:
    """The float64 numbers that `exact_bits` was given."""
    return bits.view(torch.float64)


def sequence_index(positions: PositionMask) -> TargetIndices:
    """Tells for each of the N marked places which row it stands in."""
    return positions.nonzero()[:, 0]


def per_position(values: PerTarget, positions: PositionMask) -> PerPosition:
    """Puts values of the N marked places where they belong, and 0 elsewhere."""
    return values.new_zeros(positions.shape).masked_scatter(positions, values)


def batch_sizes(lengths: Iterable[int], max_tokens: int) -> list[int]:
    """The sizes of successive batches with at most so many tokens, padding included; a longer sequence stands alone."""
    sizes, size, longest = [], 0, 0
    for length in lengths:
        longest = max(longest, length)
        if size and longest * (size + 1) > max_tokens:
            sizes.append(size)
            size, longest = 0, length
        size += 1
    return [*sizes, size] if size else sizes
