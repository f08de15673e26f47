"""The experiment of docs/results.md: every row, seed and budget, several at once on one GPU.

    python benchmarks/experiment.py rows --output experiment --workers 10 --minutes 20 --data 'news.train-*.txt.xz' \
        --validation news.valid.txt.xz --test news.test.txt.xz --other-test lm1b.heldout.txt.xz \
        --masked masked --decoder decoder --pretraining-data 'wiki.train-*.txt.xz'
    python benchmarks/experiment.py alone  (the same)    # what is timed: nothing else may run on the chip

`masked` and `decoder` are what `diffusionbert pretrain --preset wiki-small` leaves, without and with `--decoder`; the
larger network is pretrained here, on the last text. What the experiment leaves becomes docs/results.md by
`benchmarks/results`.

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
from dataclasses import replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from plan import FREQUENCIES, LOOKED_AT, SEEDS, TIMED, Job, Variation, jobs

from diffusionbert.checkpoints import RunFolder, write_json
from diffusionbert.paper.reproduction import SCALES, Reproduction, is_finished
from diffusionbert.paper.request import Request
from diffusionbert.paper.targets import survival, table1, table3, tradeoff
from diffusionbert.schedules import TokenInformation
from diffusionbert.training.config import RunConfig
from diffusionbert.training.run import default_cache, prepare, train

TIMED_STEPS = 600


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
    """Trains and evaluates; the seconds are those of all of it."""
    begin = time.monotonic()
    reproduction = _opened(output / job.folder, _asked(job, request))
    with _seconds(job.seconds(output), workers) as lap:
        if job.is_line:
            tradeoff(reproduction, job.row.system)
            lap("evaluate")
        else:
            _train_and_evaluate(job, reproduction, lap)
    return time.monotonic() - begin


def _train_and_evaluate(job: Job, reproduction: Reproduction, lap: Callable[[str], None]) -> None:
    system, run = job.row.system, RunFolder(reproduction.output / "runs" / job.row.system)
    if not run.experiment.exists():
        planned = reproduction.planned(system)
        if job.is_larger:
            lap("pretrain")
        if job.variation:
            train(_varied(planned, job.variation), run.path, cache=reproduction.cache)
    reproduction.run(system)
    lap("train")
    reproduction.evaluation(job.row.key, system, job.row.sampling, samples=None if job.writes else 2)
    lap("evaluate")
    if job.folder == "seed0" and not job.row.note:
        reproduction.other_evaluation(system)
        lap("other text")
    shutil.rmtree(run.checkpoints, ignore_errors=True)


def _varied(planned: RunConfig, variation: Variation) -> RunConfig:
    training = replace(planned.training, **dict(variation.training))
    return replace(planned, training=training, objective=replace(planned.objective, **dict(variation.objective)))


def _asked(job: Job, request: Request) -> Request:
    asked = replace(request, seed=job.seed, steps=job.steps)
    if not job.is_larger:
        return replace(asked, pretraining_data=None)
    return replace(asked, scale="34m", vocabulary=request.masked, masked=None, decoder=None)


def _apart(job: Job, output: Path, request: Request, workers: int) -> float:
    """In a process of its own: memory is given back, what was compiled is forgotten, and a crash costs one job."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_do, job, output, request, workers).result()


def rows(output: Path, request: Request, workers: int, minutes: float) -> None:
    """Does jobs side by side; none is begun after so many minutes."""
    begin = time.monotonic()
    every = [job for job in jobs() if request.pretraining_data or not job.is_larger]
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
    looked_at = _opened(output / LOOKED_AT, replace(request, seed=SEEDS[0], pretraining_data=None))
    done: Sequence[tuple[str, Callable[[], object]]] = (
        ("frequencies", lambda: _frequencies(looked_at, output / "alone")),
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


def _frequencies(reproduction: Reproduction, output: Path) -> None:
    """What the tested text costs by the word frequencies of the training text alone: who needs more has learnt less."""
    data = replace(reproduction.planned("d3pm").data, validation=reproduction.test)
    text = prepare(data, reproduction.cache)
    information = TokenInformation.from_counts(text.rows.counts, writable=text.statistics.allowed)
    tested = text.validation.counts
    nats = (tested * information.values).sum() / tested.sum()
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / FREQUENCIES, {"nats_per_token": float(nats), "tokens": int(tested.sum())})


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
            log_every=TIMED_STEPS // 12,
            validate_every=TIMED_STEPS,
            save_every=TIMED_STEPS,
            validation_sentences=8,
        )
        train(replace(experiment, training=training), run, cache=reproduction.cache)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "alone"))
    parser.add_argument("--output", type=Path, default=Path("experiment"))
    parser.add_argument("--scale", choices=SCALES, default="19m", help="a scale of `diffusionbert reproduce`")
    for name in ("data", "validation", "test", "other-test", "masked", "decoder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--pretraining-data", help="for the larger network; else it is left out")
    parser.add_argument("--workers", type=int, default=8, help="jobs side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no job is begun after these")
    options = parser.parse_args()
    names = "scale", "data", "validation", "test", "other_test", "masked", "decoder", "pretraining_data"
    request = Request(**{name: getattr(options, name) for name in names})
    if options.what == "rows":
        rows(options.output, request, options.workers, options.minutes)
    else:
        alone(options.output, request)
