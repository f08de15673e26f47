"""Measures how fast this machine trains, generates and scores, against references that run in turns with our code.

Each row times two programs that do the same work. After a warm-up they alternate in rounds, so that changes of clock
speed or of load from other processes affect both. A row reports the ratio of their speeds, the median and the spread
over the rounds, the peak memory, and the fraction of the chip's own matrix rate (measured first) that is used.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from diffusionbert import recipes
from diffusionbert.diffusion.schedules import Spindle
from diffusionbert.parallel import launch
from diffusionbert.reporting import Progress, logger, no_progress, reason_of
from diffusionbert.workflows import sampling_work, training_work
from diffusionbert.workflows.sampling_work import DecoderSampling, DecoderScoring, Forwards, OurSampling, OurScoring
from diffusionbert.workflows.timing import Machine, Speed, Stopwatch, Work, matrix_rate
from diffusionbert.workflows.training_work import HandWrittenTraining, OurTraining, PresetTraining


@dataclass(frozen=True)
class Row:
    """One comparison: our work and a reference."""

    name: str
    ours: Work
    reference: Work

    def on(self, device: str) -> Row | None:
        """The same at a size for this kind of device; None if the row is for another kind."""
        ours, reference = self.ours.on(device), self.reference.on(device)
        return None if ours is None or reference is None else replace(self, ours=ours, reference=reference)


def _rows() -> tuple[Row, ...]:
    base, bundled = training_work.BASE, training_work.BUNDLED
    spindle, modern = replace(base, schedule=Spindle(0.3)), replace(bundled, is_modern=True)
    paper_batch = replace(base, sequences=32, length=31, hybrid=0.01)
    packed = recipes.bundled("random")
    padded = replace(packed, training=replace(packed.training, packing=False))
    texts, on_cpu = sampling_work.BASE, sampling_work.CPU
    one, many = replace(texts, sequences=1), replace(texts, sequences=256)
    scored = replace(on_cpu, sequences=100)
    compiled = partial(OurSampling, compile=True)
    after_prompt = partial(OurSampling, top_p=0.5, prompt=sampling_work.PROMPT)
    return (
        Row("train-base", OurTraining(base), HandWrittenTraining(base)),
        Row("train-spindle", OurTraining(spindle), OurTraining(base)),
        Row("train-paper-batch", OurTraining(paper_batch), HandWrittenTraining(base)),
        Row("train-bundled", OurTraining(bundled), HandWrittenTraining(bundled)),
        Row("train-modernbert", OurTraining(modern), OurTraining(bundled)),
        Row("train-packed", PresetTraining(packed), PresetTraining(padded)),
        Row("sample-32", compiled(texts), DecoderSampling(texts)),
        Row("sample-32-eager", OurSampling(texts), compiled(texts)),
        Row("sample-256", compiled(many), DecoderSampling(many)),
        Row("sample-1", OurSampling(one), DecoderSampling(one)),
        Row("sample-forwards", compiled(texts), Forwards(texts, texts.length)),
        Row("sample-ancestral", compiled(texts, "ancestral"), Forwards(texts, 128)),
        Row("sample-spindle", compiled(texts, schedule=Spindle(0.3), top_k=30), compiled(texts, top_k=30)),
        *(
            Row(f"sample-cpu-{number}{name}", OurSampling(size, sampler, top_p=0.5), DecoderSampling(size))
            for name, sampler in (("", "exact"), ("-bounded", "entropy-bounded:epsilon=0.1"))
            for number, size in ((number, replace(on_cpu, sequences=number)) for number in (1, 32, 100))
        ),
        *(
            Row(f"sample-cpu-{number}-entropy", after_prompt(size, "entropy"), after_prompt(size, "exact"))
            for number, size in ((number, replace(on_cpu, sequences=number, length=22)) for number in (1, 32))
        ),
        Row(
            "sample-cpu-32-float32",
            OurSampling(replace(on_cpu, dtype=torch.float32), top_p=0.5),
            DecoderSampling(on_cpu),
        ),
        Row("score-cpu", OurScoring(scored), DecoderScoring(scored)),
        Row("score-cpu-int8", OurScoring(replace(scored, dtype=torch.int8)), DecoderScoring(scored)),
    )


ROWS = _rows()


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


def bench(
    only: Sequence[str] = (),
    *,
    device: str | None = None,
    rounds: int = 5,
    compile: bool | None = None,
    progress: Progress = no_progress,
    on_row: Callable[[BenchResult], object] = lambda result: None,
) -> BenchResult:
    """Measures the speed of training, generation and scoring on this machine.

    Args:
        only: The rows to measure, by name; all if empty.
        device: The device; None is a GPU if there is one.
        rounds: The number of turns of each program.
        compile: Whether to compile; None compiles on a GPU.
        progress: Called with the row being measured.
        on_row: Called after each row with the result so far.

    Returns:
        The rows that the machine can run, and why others were skipped.

    Examples:
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
    if str(where) == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    is_gpu = where.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(where)  # Accelerate uses it, too
    rows = {row.name: row.on(where.type) for row in ROWS if not only or row.name in only}
    other, this = ("CPUs", "a GPU") if is_gpu else ("GPUs", "a CPU")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    device_name = torch.cuda.get_device_name(where) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    skipped = {name: f"it is for {other}, and this is {this}" for name, row in rows.items() if row is None}
    rate = matrix_rate(where)
    result = BenchResult(device_name, versions, rate / 1e12, (), skipped)
    for number, (name, row) in enumerate(rows.items()):
        progress(name, number, len(rows))
        if row is None:
            continue
        try:
            found = _measured(row, where, rounds, rate, is_gpu if compile is None else compile)
        except (RuntimeError, IndexError) as error:  # from torch and its compiler
            result = replace(result, skipped=result.skipped | {name: f"it failed: {reason_of(error)}"})
        else:
            result = replace(result, rows=(*result.rows, found))
            speeds = f"{found.ours.tokens_per_second:,.0f} and {found.reference.tokens_per_second:,.0f} tokens/s"
            logger.info(f"{name}: {found.ratio:.2f} of the reference ({speeds})")
        on_row(result)
    return result


def _measured(row: Row, device: torch.device, rounds: int, rate: float, compile: bool) -> RowResult:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(device, compile, Path(folder))
        ours, reference = Stopwatch(row.ours, machine), Stopwatch(row.reference, machine)
        for _ in range(rounds):
            ours.take_turn()
            reference.take_turn()
        measured = ours.speed(rate), reference.speed(rate)
    del ours, reference
    torch.compiler.reset()  # torch compiles a function only a few times, and then gives up
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return RowResult(row.name, measured[0].tokens_per_second / measured[1].tokens_per_second, *measured)
