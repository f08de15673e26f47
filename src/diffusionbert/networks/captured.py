"""A network whose calls on a GPU are replayed as CUDA graphs.

A call launches hundreds of small kernels, and for a sampler's batches launching them takes several times as long as
running them. A graph launches them at once, but for one shape only and from tensors of its own. So a call is padded to
one of few sizes, copied into that size's tensors and replayed; what was padded is cut off again. What padding computes
is not used, and no sequence or target depends on another one. The head is not captured: it runs at the targets alone,
whose number differs from call to call.

A size is captured when it has come up `WARM_UPS` times, and the graph's first answer is compared with a plain call's;
until then, and beyond `MAX_GRAPHS`, calls run as they are, padded all the same: the shape of a call, and with it its
rounding, does not depend on what was called before.

The layers of the network can be compiled for all sizes (`compile_layers`): norms, activations and residuals are then no
kernels of their own, in the graphs and outside. That takes some seconds, and pays where much text is generated.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from diffusionbert.diffusion.shapes import PositionMask, TargetIndices, TargetLogProbs, Targets, Times, Tokens
from diffusionbert.networks.base import unsplit_modules
from diffusionbert.networks.masked import Denoiser
from diffusionbert.reporting import logger, reason_of

WARM_UPS: Final = 2
"""How often a size runs as it is before it is captured: kernels must be loaded, and workspaces allocated."""
MAX_GRAPHS: Final = 32
"""The sizes that are captured; each takes memory."""
SMALL_CALL: Final = 8192
"""Positions of a call that does not keep a GPU busy: padding to it is never slower than launching kernels."""
COMPARED: Final = 64
"""The positions at which a new graph's distributions are compared with a plain call's."""
EXACT_LENGTH: Final = 512
"""From so many positions on, a call without padding keeps its length and has no attention mask; below, lengths are
multiples of 8, so that short requests share graphs."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures a function: what replays it, and its result, which a replay overwrites."""


class Size(NamedTuple):
    """The shape of a call."""

    sequences: int
    length: int
    targets: int
    is_padded: bool

    def rounded(self) -> Size:
        """The size to which a call is padded: few sizes while a GPU has time, little padding when it is busy."""
        digits = 1 if self.sequences * self.length <= SMALL_CALL else 3
        sequences = _rounded(self.sequences, digits)
        return Size(sequences, self.length, max(sequences, _rounded(self.targets, digits)), self.is_padded)


@final
@dataclass(frozen=True, eq=False)
class _Inputs:
    """The tensors from which calls of one size are computed."""

    tokens: Tensor
    attention_mask: Tensor | None
    t: Tensor
    positions: Tensor  # all of them: targets are chosen afterwards

    @classmethod
    def of(cls, size: Size, t: Tensor) -> _Inputs:
        tokens = torch.zeros(size.sequences, size.length, dtype=torch.long, device=t.device)
        mask = torch.ones_like(tokens, dtype=torch.bool) if size.is_padded else None
        return cls(tokens, mask, t.new_ones(size.sequences), torch.arange(tokens.numel(), device=t.device))

    def fill(self, tokens: Tensor, attention_mask: Tensor | None, t: Tensor) -> None:
        """Copies a call's inputs; those of an earlier call remain where it is padded."""
        num_sequences, length = tokens.shape
        self.tokens[:num_sequences, :length].copy_(tokens)
        if self.attention_mask is not None:
            self.attention_mask[:num_sequences, length:].fill_(False)
            part = self.attention_mask[:num_sequences, :length]
            part.fill_(True) if attention_mask is None else part.copy_(attention_mask)
        self.t[:num_sequences].copy_(t)

    def hidden(self, network: Denoiser) -> Tensor:
        return network.hidden_at(self.tokens, self.attention_mask, self.t, self.positions)


@final
@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured call, with the tensors that it reads and writes."""

    replay: Callable[[], None]
    inputs: _Inputs
    hidden: Tensor


@final
class Captured:
    """A masked network in evaluation mode, called without gradients; threads take turns.

    Args:
        network: The network, whose parameters must stay where they are.
        capture: How a call is captured.
        compiled: Whether `compile_layers` was called on the network.
    """

    def __init__(self, network: Denoiser, capture: Capture | None = None, *, compiled: bool = False) -> None:
        self.network = network
        self._is_compiled = compiled
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
        size = self._size(num_sequences, length, len(positions), is_padded=attention_mask is not None)
        if size.length > length:
            positions = positions + (size.length - length) * positions.div(length, rounding_mode="floor")
        targets = functional.pad(positions, (0, size.targets - len(positions)))
        with self._lock:
            graph = self._graph(size._replace(targets=0), t)  # for any targets
            inputs = _Inputs.of(size, t) if graph is None else graph.inputs
            inputs.fill(tokens, attention_mask, t)
            if graph is not None:
                graph.replay()
            hidden = self._plain(inputs) if graph is None else graph.hidden
            chosen = hidden.index_select(0, targets)  # a copy: the next replay overwrites them all
        return self.network.log_probs(chosen)[: len(positions)]

    def _size(self, num_sequences: int, length: int, num_targets: int, *, is_padded: bool) -> Size:
        """The size at which a call is computed."""
        if is_padded or num_sequences * length < EXACT_LENGTH:
            padded_length = max(length, min(length + -length % 8, self.network.max_length))
            is_padded, length = is_padded or padded_length > length, padded_length
        # A compiler takes a size of 1 for another program than all others.
        least = 2 if self._is_compiled else 1
        return Size(max(least, num_sequences), length, num_targets, is_padded).rounded()

    def _graph(self, size: Size, t: Tensor) -> _Graph | None:
        """The graph of this size, captured if it is time."""
        if size not in self._graphs and self._is_trusted and len(self._graphs) < MAX_GRAPHS:
            self._num_calls[size] += 1
            if self._num_calls[size] > WARM_UPS:
                self._add(size, t)
        return self._graphs.get(size)

    def _plain(self, inputs: _Inputs) -> Tensor:
        """The answer of the network as it is; one that cannot be compiled here is used uncompiled, which is said."""
        try:
            return inputs.hidden(self.network)
        except RuntimeError as error:
            if not self._is_compiled or isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning(f"generating without compilation, which does not work here ({reason_of(error)})")
            self._is_compiled = False
            for layer in unsplit_modules(self.network.backbone):
                layer.__dict__.pop("forward", None)
            return inputs.hidden(self.network)

    def _add(self, size: Size, t: Tensor) -> None:
        """Captures a size, if that works here: a graph that cannot be made or errs is said once, and then no more."""
        try:
            inputs = _Inputs.of(size, t)
            replay, hidden = self._capture(lambda: inputs.hidden(self.network))
            inputs.tokens.copy_(inputs.positions.view_as(inputs.tokens) % 8)
            replay()
            found, expected = (
                self.network.log_probs(one[:COMPARED].clone()).exp() for one in (hidden, inputs.hidden(self.network))
            )
            problem = None if torch.allclose(found, expected, atol=0.01) else "other answers"
        except RuntimeError as error:
            problem = reason_of(error)
        if problem is None:
            self._graphs[size] = _Graph(replay, inputs, hidden)
        else:
            self._is_trusted = False
            logger.warning(f"generating without CUDA graphs, which do not work here ({problem}); it is slower")


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


def can_compile(network: Denoiser) -> bool:
    """Whether a network can be compiled for a GPU here; says so if not."""
    if find_spec("triton") is None:
        logger.warning("generating without compilation, which needs triton (pip install triton) on this machine")
        return False
    if not unsplit_modules(network.backbone):
        kind = type(network.backbone).__name__
        logger.warning(f"generating without compilation: transformers does not name the layers of {kind}")
        return False
    return True


def compile_layers(network: Denoiser, backend: str | Callable[..., Any] = "inductor") -> None:
    """Lets the layers of a network be compiled, all at once and for all sizes, when it is called."""
    for layer in unsplit_modules(network.backbone):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def _rounded(number: int, digits: int) -> int:
    """The number, rounded up to so many binary digits."""
    unit = 1 << max(0, (number - 1).bit_length() - digits)
    return -(-number // unit) * unit
