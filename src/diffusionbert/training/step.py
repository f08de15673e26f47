"""One training step on one global batch: gradients, clipping, optimizer, EMA.

Small batches do not keep a GPU busy: launching the thousands of kernels of a step takes longer than running them. So,
on a single GPU, a step on such a batch is captured as a CUDA graph, once per shape, and replayed with a single launch.
All positions are targets in it (`Batch.has_fixed_targets`), since no shape may depend on what is drawn.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import functional

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.likelihood.estimate import SequenceDataset
from diffusionbert.objectives.base import Draw, TrainingModule
from diffusionbert.reporting import logger
from diffusionbert.storage.files import require_writable, write_bytes
from diffusionbert.storage.limits import require_regular
from diffusionbert.training.batches import BatchPlan, BatchPosition, micro_batches
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.half_precision import HalfPrecision, suits
from diffusionbert.training.optim import EMA, blocks_of, gradient_sync, learning_rate, low_precision, weight_decay

T = TypeVar("T")

CAPTURED_POSITIONS = 8192
"""The most positions of a batch that is captured; larger ones keep a GPU busy."""
MAX_GRAPHS = 64
"""How many shapes are captured; the others run eagerly, since each graph takes memory and time to capture."""
WARM_UPS = 2
"""How often a shape is trained on before it is captured: kernels must be loaded, and workspaces allocated."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One process's share of a global batch."""

    step: int
    position: BatchPosition
    """The position in the batch plan after this batch."""
    micro_batches: list[Batch]
    num_tokens: int
    """The number of editable tokens in the global batch."""


def prepared_batches(
    sequences: SequenceDataset,
    plan: BatchPlan,
    settings: TrainingConfig,
    accelerator: Accelerator,
    *,
    start: tuple[int, BatchPosition],
    max_length: int,
    pad_id: int,
    packed: bool,
) -> Iterator[StepBatch]:
    """The batches of successive steps, prepared one step ahead in a separate thread.

    Args:
        sequences: What to train on.
        plan: The batch plan.
        settings: Optimization.
        accelerator: The devices and processes.
        start: The number of the first step, and its position in the plan.
        max_length: The most positions of a sequence.
        pad_id: The padding token.
        packed: Pack the sequences.
    """
    is_gpu = accelerator.device.type == "cuda"
    first, position = start

    def prepared() -> Iterator[StepBatch]:
        for step, (after, indices) in enumerate(plan.following(position), start=first):
            batch = Noise(settings.seed, step).stratify(sequences.batch(indices.tolist()))
            process, limit = accelerator.process_index, settings.micro_tokens
            parts = micro_batches(batch, accelerator.num_processes, process, limit, packed=packed)
            if packed:
                parts = [part.packed() for part in parts]
            elif is_gpu:
                parts = [_aligned(part, max_length, pad_id) for part in parts]
            if is_gpu:
                parts = [part.pinned() for part in parts]
            yield StepBatch(step, after, parts, int(batch.num_tokens))

    return ahead(prepared())


def packs(module: TrainingModule, settings: TrainingConfig) -> bool:
    """Whether training packs sequences; warns if it should and the network cannot."""
    is_possible: bool = getattr(module.network, "can_pack", False)
    if settings.packing and not is_possible:
        logger.warning(
            "training with padding: --packing needs a time-agnostic BERT, or a ModernBERT whose layers attend globally"
        )
    return settings.packing and is_possible


def _aligned(batch: Batch, max_length: int, pad_id: int, multiple: int = 8) -> Batch:
    """Pads to a multiple of 8 positions, which kernels need for their fast paths and which makes shapes fewer."""
    length = batch.tokens.shape[1]
    more = min(-length % multiple, max_length - length)
    if more <= 0:
        return batch
    return replace(
        batch,
        tokens=functional.pad(batch.tokens, (0, more), value=pad_id),
        attention_mask=functional.pad(batch.attention_mask, (0, more)),
        editable=functional.pad(batch.editable, (0, more)),
    )


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each computed while the one before it is used."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(list, islice(items, 1))
        while current := following.result():
            following = thread.submit(list, islice(items, 1))
            yield current[0]


class TrainingStep:
    """Trains a module on a batch; the module, the optimizer and the EMA are changed in place.

    Args:
        module: The network with its objective.
        wrapped: The module as it is called in training: itself, or wrapped for several processes.
        optimizer: The optimizer, as Accelerate wraps it.
        ema: The EMA of the parameters, if there is one.
        settings: Optimization.
        accelerator: The devices and processes.
    """

    def __init__(
        self,
        module: TrainingModule,
        wrapped: nn.Module,
        optimizer: AcceleratedOptimizer,
        ema: EMA | None,
        settings: TrainingConfig,
        accelerator: Accelerator,
    ):
        self.module, self.wrapped, self.optimizer, self.ema = module, wrapped, optimizer, ema
        self.settings, self.accelerator = settings, accelerator
        self.learning_rate, self.weight_decay = learning_rate(settings), weight_decay(settings)
        self.parameters = list(module.parameters())
        is_alone = accelerator.device.type == "cuda" and accelerator.num_processes == 1
        # Gradients remember the stream they were first computed on, and the default stream cannot be captured.
        new_stream: Any = torch.cuda.Stream
        self.stream = new_stream(accelerator.device) if is_alone else None
        self.draw_stream = new_stream(accelerator.device, priority=-1) if is_alone else None
        is_bf16 = low_precision(settings) is torch.bfloat16
        self.half = HalfPrecision(module) if is_alone and is_bf16 and suits(module) else None
        self.can_capture = is_alone and settings.cuda_graphs and module.objective.is_capturable
        # Muon's step reads the learning rate on the CPU, and every optimizer's the weight decay.
        is_constant = settings.optimizer == "adamw" and settings.weight_decay_end is None
        self.can_capture &= accelerator.scaler is None and is_constant
        self.graphs: dict[tuple[int, ...], _CapturedStep] = {}
        self.num_uncaptured: Counter[tuple[int, ...]] = Counter()

    def __call__(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Updates the parameters once.

        Returns:
            This process's part of the mean loss per token, and the gradient norm.
        """
        process = self.accelerator.process_index
        # Seeds dropout.
        torch.manual_seed(((self.settings.seed * 1_000_003 + batch.step) * 65_536 + process) % 2**63)
        self._set_rates(batch.step)
        stream = self.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            loss, norm = self._captured(batch) if self._is_captured(batch) else self._computed(batch)
            if self.ema:
                self.ema.update()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return loss, norm

    def _set_rates(self, step: int) -> None:
        """Sets the learning rate and the weight decay of matrices."""
        rate, decay = self.learning_rate(step), self.weight_decay(step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured step reads it
            else:
                group["lr"] = rate
            if any(weight.ndim > 1 for weight in group["params"]):
                group["weight_decay"] = decay

    def _computed(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        accelerator = self.accelerator
        noise, num_tokens = Noise(self.settings.seed, batch.step), batch.num_tokens / accelerator.num_processes
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        if self.half is not None:
            self.half.update()
        for index, part in enumerate(batch.micro_batches):
            x0, drawn = self._drawn(part, noise)
            with gradient_sync(self.wrapped, enabled=index == len(batch.micro_batches) - 1):
                # Gradients are averaged over processes, but the parts of a batch must add up.
                total += self._differentiated(x0, noise, num_tokens, drawn)
        return total, self._update()

    def _differentiated(self, x0: Batch, noise: Noise, num_tokens: Tensor | float, drawn: Draw | None = None) -> Tensor:
        """The loss of one part of the batch; its gradients are added to those of the previous parts."""
        half = self.half
        with nullcontext() if half is None else half.applied():
            with self.accelerator.autocast() if half is None else nullcontext():
                loss: Tensor = self.wrapped(x0, noise, num_tokens, drawn)
            self.accelerator.backward(loss)
        if half is not None:
            half.add_gradients()
        return loss.detach()

    def _drawn(self, part: Batch, noise: Noise) -> tuple[Batch, Draw | None]:
        """The batch on the device, and what the objective draws ahead of the network, while the previous step runs."""
        if self.draw_stream is None:
            return part.to(self.accelerator.device), None
        now = torch.cuda.current_stream()
        with torch.cuda.stream(self.draw_stream), torch.no_grad():
            x0 = part.to(self.accelerator.device)
            objective = self.module.objective
            drawn = objective.draw(x0, noise) if objective.draws_ahead else None
        now.wait_stream(self.draw_stream)
        for tensor in _tensors_of((x0, drawn)):
            tensor.record_stream(now)  # so that its memory is not reused before this stream is done with it
        return x0, drawn

    def _update(self) -> Tensor:
        """Clips the gradients and takes an optimizer step; returns the gradient norm."""
        self.accelerator.unscale_gradients(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    # ---- captured steps ---------------------------------------------------------------------------------------------

    def _is_captured(self, batch: StepBatch) -> bool:
        first, *others = batch.micro_batches
        is_small = not others and first.packing is None and first.tokens.numel() <= CAPTURED_POSITIONS
        has_graph = tuple(first.tokens.shape) in self.graphs or len(self.graphs) < MAX_GRAPHS
        return self.can_capture and is_small and has_graph

    def _captured(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """The same as a CUDA graph; the first steps of a shape run eagerly."""
        (part,) = batch.micro_batches
        shape = tuple(part.tokens.shape)
        if shape not in self.graphs:
            self.num_uncaptured[shape] += 1
            if self.num_uncaptured[shape] <= WARM_UPS:
                return self._computed(replace(batch, micro_batches=[replace(part, has_fixed_targets=True)]))
            self.graphs[shape] = self._capture(part)
            logger.debug(f"captured a step of {shape[0]} × {shape[1]} positions as a CUDA graph")
        return self.graphs[shape].replay(part, batch)

    def _capture(self, part: Batch) -> _CapturedStep:
        device = self.accelerator.device
        inputs = replace(part.to(device), has_fixed_targets=True)
        step = torch.zeros(len(part.tokens), dtype=torch.long, device=device)
        num_tokens = torch.ones((), dtype=torch.float64, device=device)
        graph, pool = torch.cuda.CUDAGraph(), next(iter(self.graphs.values())).graph.pool() if self.graphs else None
        # The thread that prepares batches allocates memory meanwhile, which a capture of all threads would forbid.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            if self.half is not None:
                self.half.update()
            loss = self._differentiated(inputs, Noise(self.settings.seed, step), num_tokens)
            norm = self._update()
        return _CapturedStep(graph, inputs, step, num_tokens, loss, norm)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_of(getattr(value, field.name))


@dataclass(frozen=True, eq=False)
class _CapturedStep:
    """A step as a CUDA graph, with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Batch
    step: Tensor
    num_tokens: Tensor
    loss: Tensor
    norm: Tensor

    def replay(self, part: Batch, batch: StepBatch) -> tuple[Tensor, Tensor]:
        for name, tensor in part.tensors.items():
            self.inputs.tensors[name].copy_(tensor, non_blocking=True)
        self.step.fill_(batch.step)
        self.num_tokens.fill_(batch.num_tokens)
        self.graph.replay()
        return self.loss.clone(), self.norm.clone()  # the next replay overwrites them


@contextmanager
def compile_cache(path: Path | None, *, is_written: bool = True) -> Iterator[None]:
    """Loads compiled kernels from a file, if it exists, and saves them to it at the end, if `is_written`.

    Compiling takes about a minute per network; the file carries the result over to machines of the same kind. It
    contains code that torch runs, so it is only ever read from where the user says.
    """
    if path is not None and path.exists():
        require_regular(path)
        torchs_own = logging.getLogger("torch.compiler._cache")
        torchs_own.disabled = True  # it would print a traceback
        try:
            if torch.compiler.load_cache_artifacts(path.read_bytes()) is None:
                logger.warning(f"the compile cache {str(path)!r} is damaged or of another version: compiling anew")
        finally:
            torchs_own.disabled = False
    elif path is not None:
        require_writable(path.parent)
    yield
    artifacts = torch.compiler.save_cache_artifacts() if path is not None and is_written else None
    if path is not None and artifacts is not None:
        write_bytes(path, artifacts[0])


def compile_module(module: TrainingModule, *, sharded: bool) -> None:
    """Compiles the network for training, for any shapes: as a whole, unless its parameters are sharded by block.

    If this machine has no compiler, the network stays as it is, with a warning.
    """
    is_gpu = next(module.parameters()).is_cuda
    if not (find_spec("triton") if is_gpu else any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl")))):
        missing = "triton (pip install triton)" if is_gpu else "a C++ compiler"
        logger.warning(f"training without compilation, which needs {missing} on this machine")
        return
    # A norm's ε and other constants stay constants: compiled for any shape, they would become variables at first, and
    # then be fixed by compiling everything once more.
    torch._dynamo.config.specialize_float = True
    compile_training = getattr(module.network, "compile_training", None)
    if sharded or compile_training is None:
        for block in blocks_of(module):
            block.compile(dynamic=True)
    else:
        compile_training()
    module.objective.compile_training()
