"""How fast this machine trains: our training step beside a hand-written one, interleaved in one run.

Each row times two programs that do the same work: warm-up, then rounds in which both take their turn, so that a clock
or a neighbor that changes during the run changes both. A row reports the ratio of their speeds, the median and the
spread over the rounds, the peak memory, and how much of the chip's own matrix rate (measured first) is used.

Tokens are counted without padding. FLOPs are 6 per parameter and token; the vocabulary's matrix counts at masked
positions only.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from diffusionbert.diffusion.schedules import Linear, NoiseSchedule, Spindle
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.loading import NewBert, NewModernBert
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.parallel import launch
from diffusionbert.reporting import Progress, logger, no_progress
from diffusionbert.training.batches import FixedSequences
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.optim import wait_for
from diffusionbert.training.run import make_accelerator
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.trainer import Trainer

PAD, CLS, SEP, MASK = range(4)
NUM_SPECIAL = 5
SECONDS_PER_TURN = 1.0


# ---- what is measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A training step of a certain size."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.1
    vocabulary: int = 30_522
    sequences: int = 256
    length: int = 128
    schedule: NoiseSchedule = field(default_factory=Linear)
    ema: float | None = None
    hybrid: float = 0.0
    is_modern: bool = False
    """ModernBERT instead of BERT."""

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.length

    def backbone(self) -> PreTrainedModel:
        """A new network."""
        family = NewModernBert if self.is_modern else NewBert
        size = family(self.layers, self.width, self.heads, self.dropout)
        return size.build(self.vocabulary, self.length + 1, PAD, causal=False)

    def describe(self) -> str:
        name = "ModernBERT" if self.is_modern else "BERT"
        return f"{name} {self.layers}×{self.width}, {self.sequences} × {self.length}, {self.schedule}"


BASE, BUNDLED = Work(), Work(7, 384, 6, 0.0, 16_000, sequences=512, ema=0.999)  # as in the presets
SPINDLE, MODERN = replace(BASE, schedule=Spindle(0.3)), replace(BUNDLED, is_modern=True)
PAPER_BATCH = replace(BASE, sequences=32, length=31, hybrid=0.01)


@dataclass(frozen=True)
class Row:
    """One comparison: our step of one size, and a reference."""

    name: str
    ours: Work
    reference: Work
    is_own: bool = False
    """The reference is our own step, of another kind."""

    def on_cpu(self) -> Row | None:
        """The same at a size that two cores can do; None if the row is about GPUs."""
        if self.ours.width > BUNDLED.width:
            return None
        ours, reference = (replace(work, sequences=16, length=64) for work in (self.ours, self.reference))
        return replace(self, ours=ours, reference=reference)


ROWS = (
    Row("train-base", BASE, BASE),
    Row("train-spindle", SPINDLE, BASE, is_own=True),
    Row("train-paper-batch", PAPER_BATCH, BASE),
    Row("train-bundled", BUNDLED, BUNDLED),
    Row("train-modernbert", MODERN, BUNDLED, is_own=True),
)


@dataclass(frozen=True)
class Speed:
    """The speed of one program."""

    work: str
    tokens_per_second: float
    """The median over the rounds."""
    spread: float
    """The distance between the quartiles over the rounds, relative to the median."""
    milliseconds_per_step: float
    flops_fraction: float
    """The fraction of the chip's matrix rate."""
    memory_gib: float | None
    """The peak of the allocated memory; None on a CPU."""
    start_seconds: float
    """Until the first steps were done: compilation and warm-up."""


@dataclass(frozen=True)
class RowResult:
    """A measured row."""

    name: str
    ratio: float
    """Our speed divided by the reference's."""
    ours: Speed
    reference: Speed


@dataclass(frozen=True)
class BenchResult:
    """All measured rows, and where they were measured."""

    device: str
    versions: dict[str, str]
    matrix_tflops: float
    """The rate of large matrix products in the precision of the rows."""
    rows: tuple[RowResult, ...]
    skipped: dict[str, str]
    """The rows that were not measured, with the reason."""

    def table(self) -> str:
        """The rows as text, ratios first."""
        head = (
            f"{'row':18} {'ratio':>6} {'tokens/s':>11} {'±':>5} {'ms/step':>8} {'of chip':>7} {'GiB':>6} {'start':>6}"
        )
        lines = [f"{self.device}, matrix products at {self.matrix_tflops:,.1f} TFLOP/s", head]
        for row in self.rows:
            for ratio, name, speed in ((f"{row.ratio:.2f}", row.name, row.ours), ("", "  reference", row.reference)):
                memory = "" if speed.memory_gib is None else f"{speed.memory_gib:.1f}"
                lines.append(
                    f"{name:18} {ratio:>6} {speed.tokens_per_second:11,.0f} {speed.spread:5.1%} "
                    f"{speed.milliseconds_per_step:8.2f} {speed.flops_fraction:7.1%} {memory:>6} "
                    f"{speed.start_seconds:5.0f}s  {speed.work}"
                )
        return "\n".join([*lines, *(f"{name}: not measured ({why})" for name, why in self.skipped.items())])


# ---- the programs ---------------------------------------------------------------------------------------------------


class RandomSequences:
    """Sequences of one length with random tokens, `[CLS]` and `[SEP]`, as a dataset."""

    def __init__(self, work: Work, count: int = 4096):
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(NUM_SPECIAL, work.vocabulary, (count, work.length))
        self.tokens[:, 0], self.tokens[:, -1] = CLS, SEP
        self.lengths = np.full(count, work.length)

    def batch(self, indices: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(self.tokens[np.asarray(indices)])
        return replace(Batch.of(tokens, tokens >= NUM_SPECIAL), example=torch.tensor(indices))


Program = tuple[Callable[[], object], PreTrainedModel]
"""One training step, and the network that it trains."""


def our_step(work: Work, settings: TrainingConfig, folder: Path, accelerator: Accelerator) -> Program:
    """A step of our trainer."""
    counts = (1e9 / torch.arange(1, work.vocabulary + 1)).long()  # Zipf's law
    statistics = TokenStatistics(MASK, PAD, torch.arange(work.vocabulary) >= NUM_SPECIAL, (), counts)
    objective = DiscreteTimeConfig(work.schedule, num_steps=2048, hybrid=work.hybrid)
    config = RunConfig(DataConfig("random", max_length=work.length), objective=objective)
    backbone = work.backbone()
    module = config.make_module(statistics, backbone)
    settings = replace(settings, batching=FixedSequences(work.sequences), ema=work.ema)
    data = RandomSequences(work)
    trainer = Trainer(module, data, data, settings, RunFolder(folder), lambda weights, path: None, accelerator)
    steps = trainer.steps()
    return lambda: next(steps), backbone


def reference_step(work: Work, settings: TrainingConfig, device: torch.device) -> Program:
    """A hand-written step: encoder and cross-entropy at masked positions, compiled as one; AdamW, clipping, EMA."""
    model: Any = work.backbone()
    model.to(device).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device.type == "cuda")
    averages = [parameter.detach().clone() for parameter in parameters]
    tokens = torch.from_numpy(RandomSequences(work, work.sequences).tokens).to(device)
    seen = torch.ones_like(tokens)

    def loss(masked: Tensor, positions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=masked, attention_mask=seen).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, positions)[None]
        logits = model.decoder(model.head(hidden)) if work.is_modern else model.cls(hidden)
        return (weights * functional.cross_entropy(logits[0].float(), labels, reduction="none")).sum() / tokens.numel()

    compiled: Any = torch.compile(loss, dynamic=True) if settings.compile else loss
    low = torch.bfloat16 if settings.precision == "bf16" else None

    def step() -> None:
        times = torch.rand(len(tokens), 1, device=device)
        mask = torch.rand(tokens.shape, device=device) < times
        positions = mask.flatten().nonzero().squeeze(1)
        weights = (1 / times).expand(tokens.shape).flatten()[positions]
        labels = tokens.flatten()[positions]
        with torch.autocast(device.type, low, enabled=low is not None):
            value = compiled(tokens.masked_fill(mask, MASK), positions, labels, weights)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if work.ema is not None:
            torch._foreach_lerp_(averages, parameters, 1 - work.ema)

    return step, model


# ---- timing ---------------------------------------------------------------------------------------------------------


def bench(
    only: Sequence[str] = (),
    *,
    device: str | None = None,
    rounds: int = 5,
    compile: bool | None = None,
    progress: Progress = no_progress,
) -> BenchResult:
    """Measures the speed of training on this machine.

    Args:
        only: The rows to measure, by name; all if empty.
        device: The device; None is a GPU if there is one.
        rounds: How often each program takes its turn.
        compile: Whether to compile; None does on a GPU.
        progress: Called with the row that is being measured.

    Returns:
        The rows that the machine can run, and why others were skipped.

    Example:
        >>> from diffusionbert.workflows.bench import bench
        >>> print(bench(only=["train-bundled"]).table())  # doctest: +SKIP
    """
    unknown = set(only) - {row.name for row in ROWS}
    if unknown:
        names = ", ".join(row.name for row in ROWS)
        raise ValueError(f"`only` must name rows ({names}), got {min(unknown)!r}")
    if rounds < 1:
        raise ValueError(f"`rounds` must be >= 1, got {rounds}; 5 is usual")
    if launch().number > 1:
        raise ValueError("bench measures one process on one device; start it without torchrun or accelerate launch")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_gpu = where.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(where)  # that of Accelerate, too
    settings = TrainingConfig(
        learning_rate=1e-5,
        precision="bf16" if is_gpu else "no",
        compile=is_gpu if compile is None else compile,
    )
    chosen = [row for row in ROWS if not only or row.name in only]
    rows = {row.name: row if is_gpu else row.on_cpu() for row in chosen}
    rate, results = matrix_rate(where), []
    for number, (name, row) in enumerate(rows.items()):
        progress(name, number, len(rows))
        if row is not None:
            result = _measured(row, settings, where, rounds, rate)
            results.append(result)
            speeds = f"{result.ours.tokens_per_second:,.0f} and {result.reference.tokens_per_second:,.0f} tokens/s"
            logger.info(f"{name}: {result.ratio:.2f} of the reference ({speeds})")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    name = torch.cuda.get_device_name(where) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    skipped = {name: "it is about GPUs, and this is a CPU" for name, row in rows.items() if row is None}
    return BenchResult(name, versions, rate / 1e12, tuple(results), skipped)


def _measured(row: Row, settings: TrainingConfig, device: torch.device, rounds: int, rate: float) -> RowResult:
    accelerator = make_accelerator(settings, None, cpu=device.type == "cpu")
    with tempfile.TemporaryDirectory() as folder:
        ours = _Stopwatch(row.ours, our_step(row.ours, settings, Path(folder), accelerator), device)
        if row.is_own:
            program = our_step(row.reference, settings, Path(folder), accelerator)
        else:
            program = reference_step(row.reference, settings, device)
        reference = _Stopwatch(row.reference, program, device)
        for _ in range(rounds):
            ours.take_turn()
            reference.take_turn()
        measured = ours.speed(rate), reference.speed(rate)
    del ours, reference, program
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return RowResult(row.name, measured[0].tokens_per_second / measured[1].tokens_per_second, *measured)


class _Stopwatch:
    """Times a program in turns."""

    def __init__(self, work: Work, program: Program, device: torch.device):
        self.work, self.device = work, device
        self.step, backbone = program
        sizes = {name: parameter.numel() for name, parameter in backbone.named_parameters()}
        # Tokens are multiplied by all parameters but the embeddings.
        self.num_multiplied = sum(size for name, size in sizes.items() if "embeddings" not in name.split("."))
        self.start_seconds = 5 * _seconds(self.step, 5, device)  # compilation, allocation, capture
        self.steps = max(1, int(SECONDS_PER_TURN / _seconds(self.step, 1, device)))
        self.times: list[float] = []
        self.memory = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)  # the other program's, too
            self.step()
            wait_for(device)
            kept = (12 if work.ema is None else 16) * sum(sizes.values())  # parameters, two moments, EMA
            self.memory = (kept + torch.cuda.max_memory_allocated(device) - before) / 2**30

    def take_turn(self) -> None:
        self.step()
        self.times.append(_seconds(self.step, self.steps, self.device))

    def speed(self, rate: float) -> Speed:
        seconds = statistics.median(self.times)
        low, _, high = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else (seconds,) * 3
        # Half of the positions are masked on average.
        flops = 6 * self.work.num_tokens * (self.num_multiplied + self.work.vocabulary * self.work.width / 2)
        return Speed(
            self.work.describe(),
            self.work.num_tokens / seconds,
            (high - low) / seconds,
            1e3 * seconds,
            flops / seconds / rate,
            self.memory,
            self.start_seconds,
        )


def matrix_rate(device: torch.device) -> float:
    """FLOPs per second of a large matrix product of random numbers, in bfloat16 on a GPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    turns = [_seconds(lambda: left @ right, 10, device) for _ in range(5)]
    return 2 * size**3 / statistics.median(turns)


def _seconds(step: Callable[[], object], count: int, device: torch.device) -> float:
    """The mean time of a step, over several in a row."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    wait_for(device)
    return (time.perf_counter() - started) / count
