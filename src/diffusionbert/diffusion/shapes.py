"""Tensor axes, tensor types and the batch, shared by all other modules.

    B  sequences in a batch          V  vocabulary size
    L  positions in a sequence       D  width of a vector
    N  target positions (where the network is queried) of the whole batch, sequence by sequence
    T  number of steps

Time is a fraction: `0.0` is clean text, `1.0` is pure noise, and step k of T is `k / T`. A step is an interval
`(s, t)` with `0 <= s < t <= 1`, so that full steps, strides and continuous time share one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """How the P positions that are not padding are packed into one row."""

    positions: Tensor  # [P]: the index of each in the flattened batch
    offsets: Tensor  # [P]: the index of each in its own sequence
    starts: Tensor  # [B + 1]: where each sequence starts in the row, then the row's end; int32, as kernels require
    rows: Tensor  # [B · L]: the index in the row of each position of the flattened batch; meaningless for padding

    @classmethod
    def of(cls, attention_mask: PositionMask) -> Packing:
        """Packs the marked positions."""
        flat = attention_mask.flatten()
        ends = attention_mask.sum(dim=1).cumsum(dim=0)
        starts = torch.cat([torch.zeros_like(ends[:1]), ends]).to(torch.int32)
        positions = flat.nonzero().squeeze(1)
        return cls(positions, positions % attention_mask.shape[1], starts, (flat.cumsum(dim=0) - 1).clamp(min=0))

    def pack(self, values: Tensor) -> Tensor:
        """The values [B, L] without padding, [P]."""
        return values.flatten().index_select(0, self.positions)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Packing:
        return Packing(*(function(getattr(self, field.name)) for field in fields(self)))


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
    """Where the padding is, if the network may skip it."""

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
        both = replace(self, packing=None, **joined)
        return both if self.packing is None else both.packed()

    def packed(self) -> Batch:
        """The same batch, for a network that skips padding."""
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
