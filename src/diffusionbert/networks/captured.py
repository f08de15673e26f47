"""A network whose calls on a GPU are replayed as CUDA graphs.

A call launches hundreds of small kernels, and for a sampler's batches launching them takes several times as long as
running them. A graph launches them at once, but for one shape only and from tensors of its own. So a call is padded to
a size for which a graph exists, copied into that graph's tensors and replayed; what was padded is cut off again. What
padding computes is not used, and no sequence or target depends on another one. A size is captured when it has come up
`WARM_UPS` times, and the graph's first answer is compared with a plain call's; until then, and beyond `MAX_GRAPHS`,
calls run as they are. Sequences and targets are rounded up to a quarter of a power of two, positions to 8.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from diffusionbert.diffusion.shapes import PositionMask, TargetIndices, TargetLogProbs, Targets, Times, Tokens
from diffusionbert.networks.masked import Denoiser
from diffusionbert.reporting import logger, reason_of

WARM_UPS: Final = 2
"""How often a size runs as it is before it is captured: kernels must be loaded, and workspaces allocated."""
PATIENCE: Final = 16
"""The same for a size that fits a much larger graph, which is slower than its own would be but not than no graph."""
MAX_GRAPHS: Final = 32
"""The sizes that are captured; each takes memory."""
SMALL_CALL: Final = 8192
"""Positions of a call that does not keep a GPU busy: padding to it is never slower than launching kernels."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures a function: what replays it, and its result, which a replay overwrites."""


class Size(NamedTuple):
    """The shape of a call."""

    sequences: int
    length: int
    targets: int
    is_padded: bool

    def fits(self, size: Size) -> bool:
        """Whether a call of another size can be padded to this one, and still gains by it."""
        same = (self.length, self.is_padded) == (size.length, size.is_padded)
        is_larger = self.sequences >= size.sequences and self.targets >= size.targets
        return same and is_larger and (self.is_near(size) or self.sequences * self.length <= SMALL_CALL)

    def is_near(self, size: Size) -> bool:
        """Whether it is at most twice as large."""
        return self.sequences <= 2 * size.sequences and self.targets <= max(256, 2 * size.targets)


@final
@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured call, with the tensors that it reads and writes."""

    replay: Callable[[], None]
    tokens: Tensor
    attention_mask: Tensor
    t: Tensor
    positions: Tensor
    log_probs: Tensor


@final
class Captured:
    """A masked network in evaluation mode, called without gradients; threads take turns.

    Args:
        network: The network, whose parameters must stay where they are.
        capture: How a call is captured.
    """

    def __init__(self, network: Denoiser, capture: Capture | None = None) -> None:
        self.network = network
        self._capture = capture or GraphCapture()
        self._graphs: dict[Size, _Graph] = {}
        self._num_calls: Counter[Size] = Counter()
        self._is_trusted = True
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        return self.log_probs_at(tokens, attention_mask, t, Targets.of(targets).positions)

    @torch.no_grad()
    def log_probs_at(
        self, tokens: Tokens, attention_mask: PositionMask | None, t: Times, positions: TargetIndices
    ) -> TargetLogProbs:
        """log f(v | x_t) at the targets."""
        num_sequences, length = tokens.shape
        padded_length = max(length, min(length + -length % 8, self.network.max_length))
        is_padded = attention_mask is not None or padded_length > length
        size = Size(_rounded(num_sequences), padded_length, _rounded(len(positions)), is_padded)
        with self._lock:
            graph = self._graph(size, t)
            if graph is None:
                return self.network.log_probs_at(tokens, attention_mask, t, positions)
            graph.tokens[:num_sequences, :length].copy_(tokens)
            if is_padded:
                graph.attention_mask[:num_sequences, length:].fill_(False)
                part = graph.attention_mask[:num_sequences, :length]
                part.fill_(True) if attention_mask is None else part.copy_(attention_mask)
            graph.t[:num_sequences].copy_(t)
            if padded_length > length:
                positions = positions + (padded_length - length) * positions.div(length, rounding_mode="floor")
            graph.positions[: len(positions)].copy_(positions)
            graph.replay()
            return graph.log_probs[: len(positions)].clone()  # the next replay overwrites it

    def _graph(self, size: Size, t: Tensor) -> _Graph | None:
        """The graph to use for a call of this size, captured if it is time."""
        best = min((found for found in self._graphs if found.fits(size)), default=None)
        if best is None or not best.is_near(size):
            self._num_calls[size] += 1
            is_due = self._num_calls[size] > (WARM_UPS if best is None else PATIENCE)
            if is_due and self._is_trusted and len(self._graphs) < MAX_GRAPHS and self._add(size, t):
                best = size
        return None if best is None else self._graphs[best]

    def _add(self, size: Size, t: Tensor) -> bool:
        """Captures a size, if that works here: a graph that cannot be made or errs is said once, and then no more."""
        try:
            graph = self._captured(size, t)
            graph.tokens.copy_(torch.arange(graph.tokens.numel(), device=t.device).view_as(graph.tokens) % 8)
            graph.replay()
            mask = graph.attention_mask if size.is_padded else None
            expected = self.network.log_probs_at(graph.tokens, mask, graph.t, graph.positions)
            problem = None if torch.allclose(graph.log_probs.exp(), expected.exp(), atol=0.01) else "other answers"
        except RuntimeError as error:
            problem = reason_of(error)
        if problem is None:
            self._graphs[size] = graph
            return True
        self._is_trusted = False
        logger.warning(f"generating without CUDA graphs, which do not work here ({problem}); it is slower")
        return False

    def _captured(self, size: Size, t: Tensor) -> _Graph:
        tokens = torch.zeros(size.sequences, size.length, dtype=torch.long, device=t.device)
        attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        times, positions = t.new_ones(size.sequences), tokens.new_zeros(size.targets)
        mask = attention_mask if size.is_padded else None
        replay, log_probs = self._capture(lambda: self.network.log_probs_at(tokens, mask, times, positions))
        return _Graph(replay, tokens, attention_mask, times, positions, log_probs)


class GraphCapture:
    """Captures functions as CUDA graphs, which share their memory: their results are copied before the next replay."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        function()  # at this very size, before it is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._pool = graph.pool()
        return graph.replay, result


def _rounded(number: int) -> int:
    """The number, rounded up to a quarter of a power of two."""
    unit = 1 << max(0, number.bit_length() - 3)
    return -(-number // unit) * unit
