"""Tensor axes, tensor types and the batch, shared by all other modules.

    B  sequences in a batch          V  vocabulary size
    L  positions in a sequence       D  width of a vector
    N  target positions (where the network is queried) of the whole batch, sequence by sequence
    T  number of steps

Time is a fraction: `0.0` is clean text, `1.0` is pure noise, and step k of T is `k / T`. A step is an interval
`(s, t)` with `0 <= s < t <= 1`, so that full steps, strides and continuous time share one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:  # without jaxtyping, the shapes are just comments

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
TargetFlags = Bool[Tensor, "N"]
TargetLogProbs = Float[Tensor, "N V"]
PerToken = Float[Tensor, "V"]
TokenSet = Bool[Tensor, "V"]
Grid = Float[Tensor, "steps"]
PerStep = Float[Tensor, "intervals"]
Values = Float[Tensor, "..."]


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences without their padding, side by side in R rows of W positions."""

    positions: Tensor  # [R, W]: the index of each position in the flattened batch
    offsets: Tensor  # [R, W]: the index of each in its own sequence
    sequences: Tensor  # [R, W]: the sequence of each, by a number that no other sequence of the row has; -1 if empty
    indices: Tensor  # [B · L]: the index in the flattened rows of each position of the batch; meaningless for padding

    @classmethod
    def of(cls, attention_mask: PositionMask, width: int = 128) -> Packing:
        """Packs the marked positions, on the CPU; rows are wider if a sequence is longer."""
        length, lengths = attention_mask.shape[1], attention_mask.sum(dim=1)
        width = max(width, int(lengths.max()))
        width += -width % 8  # masks of other widths are copied for each call of an attention kernel
        starts = torch.tensor(_packed_starts(lengths.tolist(), width))
        num_rows = int(starts.max()) // width + 1
        indices = (starts[:, None] + torch.arange(length)).flatten()
        positions = attention_mask.flatten().nonzero().squeeze(1)
        rows = torch.zeros(3, num_rows * width, dtype=torch.long)
        rows[2] = -1
        sequences = positions.div(length, rounding_mode="floor")
        rows[:, indices[positions]] = torch.stack([positions, positions % length, sequences])
        first, second, third = rows.view(3, num_rows, width)
        return cls(first, second, third, indices.clamp(max=num_rows * width - 1))

    def pack(self, values: Tensor) -> Tensor:
        """The values [B, L] as rows [R, W]."""
        return values.flatten()[self.positions]

    @property
    def mask(self) -> Tensor:
        """Which positions attend to which, [R, 1, W, W]: those of the same sequence."""
        return (self.sequences[:, :, None] == self.sequences[:, None, :])[:, None]

    def followed_by(self, other: Packing, num_positions: int) -> Packing:
        """The packing of two batches, the first of which has so many positions, in rows of the same width."""
        return Packing(
            torch.cat([self.positions, other.positions + num_positions]),
            torch.cat([self.offsets, other.offsets]),
            torch.cat([self.sequences, other.sequences]),  # they are only compared within a row
            torch.cat([self.indices, other.indices + self.positions.numel()]),
        )

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Packing:
        return Packing(*(function(getattr(self, field.name)) for field in fields(self)))


def _packed_starts(lengths: Sequence[int], width: int) -> list[int]:
    """Where each sequence starts in the flattened rows: a row takes the longest sequence that fits until none does."""
    waiting: list[list[int]] = [[] for _ in range(width + 1)]
    for sequence, length in enumerate(lengths):
        waiting[length].append(sequence)
    starts, row, longest = [0] * len(lengths), 0, width
    while True:
        space = width
        while (length := next((size for size in range(min(space, longest), 0, -1) if waiting[size]), 0)) > 0:
            if space == width:
                longest = length
            starts[waiting[length].pop()] = row + width - space
            space -= length
        if space == width:
            return starts
        row += width


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of sequences: text to train on or to score, or canvases to generate on.

    `editable` is the only mask in which tasks differ: the process may mask or generate exactly these positions.
    `[CLS]`, `[SEP]`, padding, a prompt and a source sentence are not editable.
    """

    tokens: Tokens
    attention_mask: PositionMask  # all positions except padding, which comes at the end of a sequence
    editable: PositionMask
    example: Keys  # the key of each sequence's random numbers, so that they do not depend on its index in the batch
    strata: Strata  # the stratum (low, high) that a sequence draws its time from, modulo 1; see `Noise.stratify`
    has_fixed_targets: bool = False
    """Whether every position is a target and those not drawn count 0, so that no shape depends on the draw, as CUDA
    graphs require."""
    packing: Packing | None = None
    """How a network may read the sequences without padding."""

    @classmethod
    def of(cls, tokens: Tokens, editable: PositionMask, attention_mask: PositionMask | None = None) -> Batch:
        """Makes a batch of examples 0, 1, …, each of which draws its time from all of (0, 1).

        Two such batches draw the same noise; set other `example` keys where that matters.
        """
        size, device = tokens.shape[0], tokens.device
        attention_mask = torch.ones_like(editable) if attention_mask is None else attention_mask
        strata = torch.tensor([0.0, 1.0], dtype=torch.float64, device=device).expand(size, 2)
        return cls(tokens, attention_mask, editable, torch.arange(size, device=device), strata)

    @property
    def num_tokens(self) -> Tensor:
        """The number of editable tokens; losses are divided by its sum over the global batch."""
        return self.editable.sum()

    def constant_times(self, time: float) -> Times:
        return torch.full((len(self.tokens),), time, dtype=torch.float64, device=self.tokens.device)

    def fraction_of(self, positions: PositionMask) -> Times:
        """The fraction of each sequence's editable positions that are marked; 0 where nothing is editable."""
        fraction: Times = (positions & self.editable).sum(dim=1).double() / self.editable.sum(dim=1).clamp(min=1)
        return fraction

    def select(self, index: Tensor) -> Batch:
        """Selects sequences and removes the padding that all of them share."""
        length = int(self.attention_mask[index].any(dim=0).nonzero().max()) + 1 if len(index) else 0
        tokens, attention_mask, editable = (
            values[index, :length] for values in (self.tokens, self.attention_mask, self.editable)
        )
        chosen: dict[str, Any] = {"example": self.example[index], "strata": self.strata[index]}
        return replace(self, tokens=tokens, attention_mask=attention_mask, editable=editable, packing=None, **chosen)

    def followed_by(self, other: Batch) -> Batch:
        """These sequences, then those of a batch of the same shape."""
        joined: dict[str, Any] = {
            name: torch.cat([tensor, other.tensors[name]]) for name, tensor in self.tensors.items()
        }
        packing = None
        if self.packing is not None and other.packing is not None:
            packing = self.packing.followed_by(other.packing, self.tokens.numel())
        return replace(self, packing=packing, **joined)

    def packed(self) -> Batch:
        """The same batch, for a network that reads packed sequences."""
        return replace(self, packing=Packing.of(self.attention_mask))

    def to(self, device: torch.device | str) -> Batch:
        return self._mapped(lambda tensor: to_device(tensor, torch.device(device)))

    def pinned(self) -> Batch:
        """The same batch in pinned memory, which a GPU copies from asynchronously."""
        return self._mapped(lambda tensor: tensor.contiguous().pin_memory())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The batch's tensors by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors.items()}
        return replace(self, packing=self.packing and self.packing.mapped(function), **changed)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to a device; copies to a GPU are asynchronous."""
    # A copy from pageable memory would wait for all work queued on the GPU.
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    needs_pinning = is_upload and not tensor.is_pinned()
    return (tensor.contiguous().pin_memory() if needs_pinning else tensor).to(device, non_blocking=is_upload)


@dataclass(frozen=True, eq=False)
class Targets:
    """The N target positions of a batch, as indices into the flattened batch: found once, then only looked up."""

    positions: TargetIndices
    mask: PositionMask
    """Which positions count; values at others are ignored."""
    is_fixed: bool = False
    """Whether all positions are targets, including those that do not count."""

    @classmethod
    def of(cls, mask: PositionMask, *, fixed: bool = False) -> Targets:
        """The marked positions; if `fixed`, all positions, with those not marked counting 0."""
        flat = mask.flatten()
        if fixed:
            return cls(torch.arange(len(flat), device=flat.device), mask, is_fixed=True)
        return cls(flat.nonzero().squeeze(1), mask)

    @property
    def sequences(self) -> TargetIndices:
        """The batch index of each target position."""
        return self.positions.div(self.mask.shape[1], rounding_mode="floor")

    def take(self, values: Tensor) -> Tensor:
        """The values [B, L] at the target positions, [N]."""
        return values.flatten().index_select(0, self.positions)

    def counted(self, values: PerTarget) -> PerTarget:
        """The values [N], with 0 where they do not count: a NaN there would spread to the gradients."""
        return torch.where(self.take(self.mask), values, 0.0) if self.is_fixed else values

    def scatter(self, values: PerTarget) -> PerPosition:
        """Scatters values [N] to their positions, [B, L], with 0 elsewhere."""
        scattered = values.new_zeros(self.mask.numel()).index_copy(0, self.positions, values).view(self.mask.shape)
        return torch.where(self.mask, scattered, 0.0)


def exact_bits(values: Tensor) -> Tensor:
    """Returns float64 values reinterpreted as int64: a buffer that `half()` and `bfloat16()` do not round."""
    return values.double().contiguous().view(torch.int64)


def from_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.float64)


def sequence_index(positions: PositionMask) -> TargetIndices:
    """Returns the batch index of each of the N marked positions."""
    return positions.nonzero()[:, 0]


def per_position(values: PerTarget, positions: PositionMask) -> PerPosition:
    """Scatters the values of the N marked positions to [B, L], with 0 elsewhere."""
    return values.new_zeros(positions.shape).masked_scatter(positions, values)


def batch_sizes(lengths: Iterable[int], max_tokens: int) -> list[int]:
    """Sizes of successive batches of at most `max_tokens`, padding included; a longer sequence gets its own batch."""
    sizes, size, longest = [], 0, 0
    for length in lengths:
        longest = max(longest, length)
        if size and longest * (size + 1) > max_tokens:
            sizes.append(size)
            size, longest = 0, length
        size += 1
    return [*sizes, size] if size else sizes
