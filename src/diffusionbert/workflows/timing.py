"""Times programs in turns.

A program repeats one piece of work: a training step, a batch of texts, scores. It reports its tokens, whose number may
change from step to step, and its FLOPs, so that its speed can be compared with the chip's own rate of matrix products.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from diffusionbert.training.optim import wait_for

SECONDS_PER_TURN = 1.0


@dataclass(frozen=True)
class Machine:
    """The machine that programs run on."""

    device: torch.device
    compile: bool
    folder: Path
    """The folder for files that a program writes; removed afterwards."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Amount:
    """How much work was done."""

    num_tokens: int
    """The number of tokens trained on, generated or scored."""
    flops: float


@dataclass(frozen=True, eq=False)
class Program:
    """A piece of work that can be repeated."""

    step: Callable[[], Amount]
    """Does the work once."""
    kept_bytes: int = 0
    """The memory held between steps."""
    warm_ups: int = 1
    """The number of steps until it runs at full speed."""


class Work(ABC):
    """What a program does; subclasses are frozen dataclasses."""

    @abstractmethod
    def describe(self) -> str:
        """A short description."""

    @abstractmethod
    def on(self, device: str) -> Work | None:
        """The same at a size for this kind of device (`cpu` or `cuda`); None if it is for another kind."""

    @abstractmethod
    def program(self, machine: Machine) -> Program:
        """Sets up everything it needs."""


@dataclass(frozen=True)
class Speed:
    """The speed of one program."""

    work: str
    tokens_per_second: float
    """The median over the rounds."""
    spread: float
    """The interquartile range over the rounds, relative to the median."""
    milliseconds_per_step: float
    flops_fraction: float
    """The fraction of the chip's matrix rate."""
    memory_gib: float | None
    """The peak allocated memory; None on a CPU."""
    start_seconds: float
    """The time until the first steps were done: compilation and warm-up."""


@dataclass(frozen=True)
class _Turn:
    """The means over the steps of a turn."""

    seconds: float
    num_tokens: float
    flops: float


class Stopwatch:
    """Times a program in turns."""

    def __init__(self, work: Work, machine: Machine):
        self.work, self.device = work, machine.device
        self.program = work.program(machine)
        *_, last = durations = [self._turn(1).seconds for _ in range(self.program.warm_ups)]
        self.start_seconds = sum(durations)
        self.steps = max(1, int(SECONDS_PER_TURN / last))
        self.turns: list[_Turn] = []
        self.memory = None
        if machine.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)  # includes the other program's memory
            self._turn(1)
            peak = torch.cuda.max_memory_allocated(self.device) - before
            self.memory = (self.program.kept_bytes + peak) / 2**30

    def take_turn(self) -> None:
        if self.steps > 1:  # only short steps notice what the other program left in caches
            self.program.step()
        self.turns.append(self._turn(self.steps))

    def _turn(self, count: int) -> _Turn:
        done: list[Amount] = []
        mean = seconds(lambda: done.append(self.program.step()), count, self.device)
        return _Turn(mean, sum(one.num_tokens for one in done) / count, sum(one.flops for one in done) / count)

    def speed(self, rate: float) -> Speed:
        """The speed over all turns; `rate` is the chip's matrix rate."""
        speeds = [turn.num_tokens / turn.seconds for turn in self.turns]
        median = statistics.median(speeds)
        low, _, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else (median,) * 3
        return Speed(
            self.work.describe(),
            median,
            (high - low) / median,
            1e3 * statistics.median(turn.seconds for turn in self.turns),
            statistics.median(turn.flops / turn.seconds for turn in self.turns) / rate,
            self.memory,
            self.start_seconds,
        )


def seconds(step: Callable[[], object], count: int, device: torch.device) -> float:
    """The mean time of a step, over several in a row."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    wait_for(device)
    return (time.perf_counter() - started) / count


def matrix_rate(device: torch.device) -> float:
    """FLOPs per second of a large matrix product of random numbers, in bfloat16 on a GPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    turns = [seconds(lambda: left @ right, 10, device) for _ in range(5)]
    return 2 * size**3 / statistics.median(turns)


def num_multiplied(backbone: PreTrainedModel) -> int:
    """The number of parameters that every token is multiplied with: all but the embeddings (and vocabulary matrix)."""
    parameters = backbone.named_parameters()
    return sum(one.numel() for name, one in parameters if not {"embeddings", "wte", "wpe"} & set(name.split(".")))
