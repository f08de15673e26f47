"""Counter-based random numbers, keyed by seed, example, step, purpose and position.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a key and a counter to
random bits. The key is the seed; the counter encodes the example, the step, the purpose and the position. The
numbers do not depend on the batch, the process or the device: one process and eight see the same noise, a batch
gives the same result as its sequences one by one, and a resumed run has no generator state to restore.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from numbers import Integral

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import Batch, Counts, Keys, PerPosition, PositionMask, Times, Values
from diffusionbert.reporting import logger, reason_of, require_type

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Returns four 32-bit words (as int64) for each four-word counter; counters broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, which preserves exactly the bits we use.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ k0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


# Each thread computes the 52 bits of one number, with the same arithmetic modulo 2**64 as `philox`.
_KERNEL = """
template <typename T> T uniform_bits(T index, T word1, T word2, T word3, T key0, T key1) {
  unsigned long long c0 = index >> 1, c1 = word1, c2 = word2, c3 = word3, k0 = key0, k1 = key1;
  const unsigned long long low = 0xFFFFFFFFull;
  for (int round = 0; round < 10; ++round) {
    unsigned long long p0 = c0 * 0xD2511F53ull, p1 = c2 * 0xCD9E8D57ull;
    c0 = (p1 >> 32) ^ c1 ^ k0; c1 = p1 & low; c2 = (p0 >> 32) ^ c3 ^ k1; c3 = p0 & low;
    k0 = (k0 + 0x9E3779B9ull) & low; k1 = (k1 + 0xBB67AE85ull) & low;
  }
  unsigned long long bits = (index & 1) ? (c2 << 32 | c3) : (c0 << 32 | c1);
  return (T)((bits >> 12) & ((1ull << 52) - 1));
}
"""


@functools.cache
def _kernel() -> Callable[..., Tensor] | None:
    """A GPU kernel that turns an index and three counter words into random bits; None if torch cannot compile it."""
    try:
        from torch.cuda.jiterator import _create_jit_fn as compile_kernel

        kernel: Callable[..., Tensor] = compile_kernel(_KERNEL, key0=0, key1=0)
        one = torch.ones(1, dtype=torch.long, device="cuda")
        kernel(one, one, one, one)
    except (ImportError, RuntimeError) as error:
        logger.info(f"random numbers are drawn without a fused kernel ({reason_of(error)})")
        return None
    return kernel


class Purpose(IntEnum):
    """What a random number is used for; two purposes never share a number."""

    TIME = 0
    CORRUPT = 1
    REPLACE = 2
    ORDER = 3
    SAMPLE = 4
    GAUSS = 5
    KEEP = 6
    TURN = 7
    UNMASK = 8
    REMASK = 9
    PLACEMENT = 11
    LENGTH = 12
    UNROLL = 13
    PAIR = 14


@dataclass(frozen=True)
class Noise:
    """The random numbers of one step (of training, sampling or an estimate) under one seed."""

    seed: int
    step: int | Keys = 0  # one step for all examples, or one per example, so that one call can draw for many steps
    is_mirrored: bool = False  # whether every uniform number u is replaced by 1 - u

    def __post_init__(self) -> None:
        require_type("seed", self.seed, Integral, "a whole number")

    def uniform(self, example: Keys, purpose: Purpose, *shape: int) -> Values:
        """Draws float64 numbers from the open interval (0, 1), one block of the given shape per example."""
        count = math.prod(shape)
        example = example.long()[:, None]
        steps = torch.as_tensor(self.step, device=example.device).reshape(-1, 1)
        counter = example & _MASK32, steps & _MASK32, ((example >> 32) << 8) | int(purpose)
        seed = int(self.seed)  # those of numpy would overflow
        key = seed & _MASK32, (seed >> 32) & _MASK32
        if example.is_cuda and (kernel := _kernel()) is not None:
            index = torch.arange(count, device=example.device)
            bits = kernel(index, *counter, key0=key[0], key1=key[1])
        else:
            words = philox((torch.arange((count + 1) // 2, device=example.device), *counter), key)
            pairs = [(((high << 32 | low) >> 12) & ((1 << 52) - 1)) for high, low in (words[:2], words[2:])]
            bits = torch.stack(pairs, dim=-1).flatten(1)[:, :count]
        if self.is_mirrored:
            bits = bits ^ ((1 << 52) - 1)
        # 52 random bits plus one half: never 0, never 1, and exact in float64; so is 1 - u.
        return ((bits.double() + 0.5) * 2.0**-52).reshape(len(example), *shape)

    def stratified_uniform(self, batch: Batch) -> Times:
        """Draws one number in [0, 1) per sequence, from that sequence's stratum."""
        low, high = batch.strata.unbind(dim=1)
        if self.is_mirrored:
            low, high = -high, -low
        return (low + (high - low) * self.uniform(batch.example, Purpose.TIME)) % 1

    def mirrored(self) -> Noise:
        """The same numbers with 1 - u in place of u: antithetic draws."""
        return replace(self, is_mirrored=not self.is_mirrored)

    def stratify(self, batch: Batch) -> Batch:
        """Assigns each of the B sequences its own stratum of (0, 1), of length 1/B, so that the strata tile it.

        All strata are shifted by one random number (modulo 1). Over many steps, each sequence therefore draws from
        the whole interval, and its estimates are unbiased whatever the order of the sequences.
        """
        size, device = len(batch.tokens), batch.tokens.device
        shift = self.uniform(torch.zeros(1, dtype=torch.long, device=device), Purpose.TURN)
        edges = torch.arange(size + 1, dtype=torch.float64, device=device) / max(size, 1) + shift
        return replace(batch, strata=torch.stack([edges[:-1], edges[1:]], dim=1))

    def per_position(self, batch: Batch, purpose: Purpose) -> PerPosition:
        """Draws one number from (0, 1) for each position of each sequence."""
        return self.uniform(batch.example, purpose, batch.tokens.shape[1])

    def chosen(self, batch: Batch, number: Counts) -> PositionMask:
        """Draws `number` editable positions per sequence; every subset of that size is equally likely."""
        order = self.per_position(batch, Purpose.ORDER).masked_fill(~batch.editable, torch.inf)
        return batch.editable & (order.argsort(dim=1).argsort(dim=1) < number[:, None])

    def normal(self, example: Keys, purpose: Purpose, *shape: int) -> Values:
        """Draws float64 standard normal numbers, one block of the given shape per example."""
        # Inverting the CDF takes one uniform number per normal one; Box-Muller would need pairs.
        numbers: Tensor = torch.special.ndtri(self.uniform(example, purpose, *shape))
        return numbers
