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
Places = Bool[Tensor, "B L"]
RowTimes = Float[Tensor, "B"]
RowValues = Float[Tensor, "B"]
RowKeys = Int[Tensor, "B"]
RowCounts = Int[Tensor, "B"]
RowFlags = Bool[Tensor, "B"]
Strata = Float[Tensor, "B 2"]
PerPlace = Float[Tensor, "B L"]
Vectors = Float[Tensor, "B L D"]
PerAsked = Float[Tensor, "N"]
AskedVectors = Float[Tensor, "N D"]
AskedTokens = Int[Tensor, "N"]
AskedRows = Int[Tensor, "N"]
AskedLogProbs = Float[Tensor, "N V"]
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
    attend: Places
    """Places the network looks at: all but padding, which stands at the end of a row."""
    editable: Places
    example: RowKeys
    """Names each row; its random numbers depend on this name and not on where in which batch the row is."""
    strata: Strata
    """The slice of (0, 1) from which a row draws its time, beyond 1 going on from 0; see `Noise.stratify`."""

    @classmethod
    def of(cls, tokens: Tokens, editable: Places, attend: Places | None = None) -> Batch:
        """Makes a batch whose rows are examples 0, 1, …, each drawing its time from all of (0, 1).

        Two batches made so draw the same noise; give their rows other names where that matters.
        """
        rows, device = tokens.shape[0], tokens.device
        return cls(
            tokens,
            torch.ones_like(editable) if attend is None else attend,
            editable,
            torch.arange(rows, device=device),
            torch.tensor([0.0, 1.0], dtype=torch.float64, device=device).expand(rows, 2),
        )

    @property
    def num_tokens(self) -> Tensor:
        """The number of editable tokens: what losses are divided by, summed over the global batch."""
        return self.editable.sum()

    def row_times(self, time: float) -> RowTimes:
        """One time for all rows."""
        return torch.full((len(self.tokens),), time, dtype=torch.float64, device=self.tokens.device)

    def share_of(self, places: Places) -> RowTimes:
        """What share of each row's editable places is marked; 0 where nothing is editable."""
        share: RowTimes = (places & self.editable).sum(dim=1).double() / self.editable.sum(dim=1).clamp(min=1)
        return share

    def rows(self, index: Tensor) -> Batch:
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


def rows_of(places: Places) -> AskedRows:
    """Tells for each of the N marked places which row it stands in."""
    return places.nonzero()[:, 0]


def per_place(values: PerAsked, places: Places) -> PerPlace:
    """Puts values of the N marked places where they belong, and 0 elsewhere."""
    return values.new_zeros(places.shape).masked_scatter(places, values)
