"""The experiment of docs/results.md: every row, seed and budget, several at once on one GPU.

    python benchmarks/experiment.py rows --output experiment --workers 10 --minutes 20 --data 'news.train-*.txt.xz' \
        --validation news.valid.txt.xz --test news.test.txt.xz --other-test lm1b.heldout.txt.xz \
        --masked masked --decoder decoder
    python benchmarks/experiment.py alone  (the same)    # what is timed: nothing else may run on the chip

`masked` and `decoder` are what `diffusionbert pretrain --preset wiki-small` leaves, without and with `--decoder`. What
the experiment leaves becomes docs/results.md by `benchmarks/results`.

Everything goes through `diffusionbert.paper.reproduction`, so what is finished is not done again: a stopped experiment
goes on, and `diffusionbert reproduce table2 --output experiment/seed0` finds its rows.
"""

from __future__ import annotations

import argparse
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from diffusionbert.checkpoints import write_json
from diffusionbert.paper.reproduction import SCALES, Reproduction, Request, is_finished
from diffusionbert.paper.targets import MAIN, SCALED, TRADED_OFF, Row, survival, table1, table3, tradeoff
from diffusionbert.runs import default_cache, train

SEEDS = (1, 2)
"""Beside 0, for the rows that carry a claim."""
LOOKED_AT = f"seed{SEEDS[0]}"
"""Whose models write for table 1, table 3 and figure 3: those rows are all among the claims."""
CLAIMED = (
    *("diffusionbert", "d3pm-tad", "d3pm", "diffusionbert-spindle", "diffusionbert-lte", "diffusionbert-pte"),
    *("diffusionbert-spindle-paper", "d3pm-spindle", "decoder", "diffusion-lm", "diffusion-lm-bert", "bert-mouth"),
    *("diffusionbert-bell", "decoder-pretrained"),
)
BUDGETS = (600, 6000)
"""Training steps beside the preset's."""
REWRITTEN = ("diffusionbert", "d3pm", "decoder")
"""The systems that write the samples of BLEU with every seed."""
TIMED = ("diffusionbert", "d3pm", "decoder")
"""The systems whose training steps are timed: a masked one, one that is told the time, a causal one."""
TIMED_STEPS = 150


@dataclass(frozen=True)
class Job:
    """One row of a folder, or a line of figure 3."""

    folder: str
    row: Row
    seed: int = 0
    steps: int | None = None
    is_line: bool = False

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.folder}/{self.row.key}{'-line' if self.is_line else ''}"

    @property
    def needs(self) -> str | None:
        """The job that trains its model, unless it does so itself."""
        return f"{self.folder}/{self.row.system}" if self.is_line or self.row.note else None

    def seconds(self, output: Path) -> Path:
        """What it took; the file is written when it is done."""
        folder, _, name = self.name.partition("/")
        return output / folder / "seconds" / f"{name}.json"

    def do(self, reproduction: Reproduction, workers: int) -> None:
        """Trains and evaluates."""
        with _seconds(self.seconds(reproduction.output.parent), workers) as lap:
            system = self.row.system
            if self.is_line:
                tradeoff(reproduction, system)
                lap("evaluate")
                return
            run = reproduction.run(system)
            lap("train")
            writes = self.folder == "seed0" or (self.steps is None and system in REWRITTEN)
            few = None if writes else 2
            reproduction.evaluation(self.row.key, system, self.row.sampling, samples=few)
            lap("evaluate")
            if self.folder == "seed0" and not self.row.note:
                reproduction.other_evaluation(system)
                lap("other text")
            shutil.rmtree(run / "checkpoints", ignore_errors=True)


def jobs() -> list[Job]:
    """All of them: the longest first, or others would wait for them in the end; then the most important."""
    order = {name: number for number, name in enumerate(CLAIMED)}
    short, long = BUDGETS
    return [
        *(Job(f"steps{long}", Row(name), steps=long) for name in SCALED),
        *(Job("seed0", row) for row in sorted(MAIN, key=lambda row: order.get(row.system, len(order)))),
        *(Job(LOOKED_AT, Row(name), seed=SEEDS[0]) for name in CLAIMED),
        *(Job(f"steps{short}", Row(name), steps=short) for name in SCALED),
        *(Job(LOOKED_AT, Row(name), seed=SEEDS[0], is_line=True) for name in TRADED_OFF),
        *(Job(f"seed{seed}", Row(name), seed=seed) for name in CLAIMED for seed in SEEDS[1:]),
    ]


@contextmanager
def _seconds(path: Path, workers: int) -> Iterator[Callable[[str], None]]:
    laps: dict[str, float] = {"workers": workers}  # who share the chip: all of these seconds are longer for it
    last = time.monotonic()

    def lap(name: str) -> None:
        nonlocal last
        laps[name], last = time.monotonic() - last, time.monotonic()

    yield lap
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, laps)


# ---- several at once ------------------------------------------------------------------------------------------------


@lru_cache
def _opened(output: Path, request: Request) -> Reproduction:
    return Reproduction(output, request, default_cache())


def _do(job: Job, output: Path, request: Request, workers: int) -> float:
    begin = time.monotonic()
    job.do(_opened(output / job.folder, replace(request, seed=job.seed, steps=job.steps)), workers)
    return time.monotonic() - begin


def _apart(job: Job, output: Path, request: Request, workers: int) -> float:
    """In a process of its own: memory is given back, what was compiled is forgotten, and a crash costs one job."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_do, job, output, request, workers).result()


def rows(output: Path, request: Request, workers: int, minutes: float) -> None:
    """Does jobs side by side; none is begun after so many minutes."""
    begin = time.monotonic()
    every = jobs()
    finished = {job.name for job in every if job.seconds(output).exists()}
    waiting = [job for job in every if job.name not in finished]
    running: dict[Future[float], Job] = {}
    with ThreadPoolExecutor(workers) as pool:
        while True:
            is_late = time.monotonic() - begin > 60 * minutes
            ready = [] if is_late else [job for job in waiting if job.needs is None or job.needs in finished]
            for job in ready[: workers - len(running)]:
                waiting.remove(job)
                running[pool.submit(_apart, job, output, request, workers)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                error = future.exception()
                if error is None:
                    finished.add(job.name)
                    words = f"{future.result():.0f} s"
                else:
                    words = "failed\n" + "".join(traceback.format_exception(error))
                print(f"{time.monotonic() - begin:6.0f} s  {job.name}: {words}", flush=True)
    if waiting:
        print(f"not begun: {', '.join(job.name for job in waiting)}", flush=True)


# ---- one at a time --------------------------------------------------------------------------------------------------


def alone(output: Path, request: Request) -> None:
    """What is timed, or needs a moment."""
    looked_at = _opened(output / LOOKED_AT, replace(request, seed=SEEDS[0]))
    done: Sequence[tuple[str, Callable[[], object]]] = (
        ("step times", lambda: _step_times(looked_at, output / "alone")),
        ("table 1", lambda: table1(looked_at)),
        ("figure 2", lambda: survival(looked_at)),
        ("table 3", lambda: table3(looked_at)),
    )
    for name, do in done:
        begin = time.monotonic()
        try:
            do()
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        except Exception:  # the others are worth having all the same
            traceback.print_exc()


def _step_times(reproduction: Reproduction, output: Path) -> None:
    """Short runs whose logs say how many tokens a second are trained."""
    for name in TIMED:
        run = output / "runs" / name
        if is_finished(run):
            continue
        experiment = reproduction.planned(name)
        training = replace(
            experiment.training,
            steps=TIMED_STEPS,
            log_every=TIMED_STEPS // 5,
            validate_every=TIMED_STEPS,
            save_every=TIMED_STEPS,
            validation_sentences=8,
        )
        train(replace(experiment, training=training), run, reproduction.cache)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "alone"))
    parser.add_argument("--output", type=Path, default=Path("experiment"))
    parser.add_argument("--preset", choices=SCALES, default="small", help="a scale of `diffusionbert reproduce`")
    for name in ("data", "validation", "test", "other-test", "masked", "decoder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--workers", type=int, default=8, help="jobs side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no job is begun after these")
    options = parser.parse_args()
    request = Request(
        options.preset,
        options.data,
        options.validation,
        options.test,
        options.other_test,
        masked=options.masked,
        decoder=options.decoder,
    )
    if options.what == "rows":
        rows(options.output, request, options.workers, options.minutes)
    else:
        alone(options.output, request)
