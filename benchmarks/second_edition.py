r"""The second edition of the experiment behind docs/results.md: a plan with the cost of its rows, and a runner.

    python benchmarks/second_edition.py plan                                    every row: tokens, minutes
    python benchmarks/second_edition.py run experiment --text TEXT --minutes 25 --only starts rates seed0
    python benchmarks/experiment.py experiment docs/results/second
    python benchmarks/second_edition.py run experiment --text TEXT --kept docs/results/second    what is left, elsewhere
    python benchmarks/second_edition.py run small --text TEXT --size small --workers 2 --minutes 600    on two cores
    python benchmarks/report.py docs/results/second docs/results/tables --small docs/results/small \
        --pages docs/results.md docs/results/details.md

`TEXT` is a folder with news.train-*.txt.xz, news.valid, news.test, wiki.train-*, wiki.valid and lm1b.heldout. `run`
runs the remaining rows, each with its own log (GROUP/logs), in several processes; rows of one process share its imports
and its compiled code. It starts nothing that would not finish in time. A stopped row is resumed if its settings are the
same, and existing evaluations are kept. Texts and models may arrive while it runs: what belongs to NAME is not read as
long as there is a file NAME.part beside it. On another machine, kept rows (`--kept`) are not run again, except networks
that others start from: copy their model folders (in files of at most 15 MB), or let them be trained once more.
`second_edition_rows.py` defines the rows.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from second_edition_rows import CAUSAL, JUDGE, MASKED, SIZES, STARTING, Evaluation, Row, Settings, Size, rows

from diffusionbert.evaluation.dataset import EvaluationSet, open_evaluation_set
from diffusionbert.evaluation.evaluate import Plan, evaluate
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.result import Weights
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.likelihood.estimate import EstimationBudget, fast_products
from diffusionbert.networks.loading import NewBert, Pretrained, of_family
from diffusionbert.objectives.base import ObjectiveConfig
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.recipes import SYSTEMS, pretraining_of, started_from
from diffusionbert.reporting import set_verbosity
from diffusionbert.reproduce.reproduction import is_finished
from diffusionbert.storage.files import build_once, code_version, read_json, write_bytes, write_json
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.log import ValidationEvent, events_of
from diffusionbert.training.optim import fitting_ema
from diffusionbert.training.run import prepare, stored_config, train
from diffusionbert.training.run_folder import RunFolder

Folder = tyro.conf.Positional[Path]

# ---- the plan -------------------------------------------------------------------------------------------------------


def plan(only: tuple[str, ...] = (), size: str = "full") -> None:
    """Print every row with its tokens and estimated minutes on one H200; at small size, on two cores."""
    chosen = [row for row in rows(SIZES[size]) if not only or row.group in only]
    print(f"{'row':<42} {'system':<28} {'start':<28} {'tokens':>8}  {'evaluations':>11}  minutes")
    for row in chosen:
        tokens, minutes = row.tokens(SIZES[size]) / 1e6, row.seconds(SIZES[size]) / 60
        cells = f"{row.key:<42} {row.system:<28} {row.start or '–':<28} {tokens:>7.1f}M  {len(row.evaluations):>11}"
        print(f"{cells}  {minutes:7.2f}")
    print()
    for group in (*dict.fromkeys(row.group for row in chosen), "together"):
        own = [row for row in chosen if group in (row.group, "together")]
        minutes = sum(row.seconds(SIZES[size]) for row in own) / 60
        print(f"{group:<14} {len(own):>3} rows {minutes:7.1f} minutes")


# ---- one row --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Where rows are trained, and on which texts."""

    output: Path
    text: Path
    size: Size = field(default_factory=Size)
    kept: Path | None = None
    """The finished rows that `experiment.py` kept."""
    compile: bool = False

    def corpus(self, name: str) -> str:
        """The file of a text by name, such as news.train or lm1b.heldout; a glob if there are several."""
        found = self.files(name)
        if not found:
            raise SystemExit(f"{str(self.text)!r} has no {name}*.txt or {name}*.txt.xz; give the folder of the texts")
        return str(found[0]) if len(found) == 1 else str(self.text / f"{name}-*{''.join(found[0].suffixes[1:])}")

    def files(self, name: str) -> list[Path]:
        """The files of a text, compressed or not; none while they arrive."""
        if (self.text / f"{name}.part").exists():
            return []
        return sorted(path for end in (".txt", ".txt.xz") for path in self.text.glob(f"{name}*{end}"))

    def is_ready(self, row: Row) -> bool:
        """Whether the texts and models that a row uses exist; they may arrive while other rows run."""
        texts = f"{row.text}.train", f"{row.text}.valid", *(one.text for one in row.evaluations)
        return all(map(self.has_model, row.models)) and all(map(self.files, texts))

    def run_folder(self, key: str) -> Path:
        group, name = key.split("/")
        return self.output / group / "runs" / name

    def record(self, row: Row) -> Path:
        """The file that records a row's duration, code, data and weights; written when the row is done."""
        return self.output / row.group / "seconds" / f"{row.name}.json"

    def is_done(self, row: Row) -> bool:
        return self.record(row).exists()

    def is_kept(self, row: Row) -> bool:
        """Whether a row was done elsewhere; its model is not here then."""
        return self.kept is not None and (self.kept / self.record(row).relative_to(self.output)).exists()

    def has_model(self, key: str) -> bool:
        return (self.run_folder(key) / "model").is_dir() and not self.is_arriving(key)

    def is_arriving(self, key: str) -> bool:
        """Whether a row's model is being copied from elsewhere."""
        return (self.run_folder(key) / "model.part").exists()

    @property
    def awaits_files(self) -> bool:
        """Whether a text or model is being copied from elsewhere."""
        return any(self.text.glob("*.part")) or any(self.output.glob("*/runs/*/model.part"))

    def evaluation(self, row: Row, one: Evaluation) -> Path:
        group, name = one.folder.format(group=row.group, name=row.name).split("/")
        return self.output / group / "evaluations" / name

    # ---- training ---------------------------------------------------------------------------------------------------

    def best(self, keys: tuple[str, ...]) -> Row:
        """The row with the fewest nats in its last validation."""

        def nats(key: str) -> float:
            group, name = key.split("/")
            logs = [self.run_folder(key) / "log.jsonl"]
            logs += [] if self.kept is None else [self.kept / group / "trained" / name / "log.jsonl"]
            events = events_of(next(log for log in logs if log.exists()), ValidationEvent)
            last = events[-1].nats_per_token
            return math.inf if last is None or math.isnan(last) else last

        best = min(keys, key=nats)
        return next(row for row in rows(self.size) if row.key == best)

    def config(self, row: Row) -> RunConfig:
        """The configuration to train."""
        size, steps = self.size, max(1, row.tokens(self.size) // self.size.batch_tokens)
        rate = row.rate or self.best(row.search).rate
        assert rate is not None
        half = max(1, steps // 2)
        training = TrainingConfig(
            steps=steps, batching=TokenBudget(size.batch_tokens), optimizer=size.optimizer, learning_rate=rate,
            warmup=steps // 10,
            ema=fitting_ema(steps), precision=size.precision, compile=self.compile, seed=row.seed,
            log_every=max(1, steps // 40), validate_every=half, validation_sentences=min(1024, size.sentences),
            validation_draws=8, save_every=half, keep=1,
        )  # fmt: skip
        data = DataConfig(
            self.corpus(f"{row.text}.train"),
            self.corpus(f"{row.text}.valid"),
            vocabulary=self.vocabulary,
            max_length=size.max_length,
        )
        backbone = of_family(NewBert(size.layers, size.width, size.heads, dropout=0.0), row.backbone)
        base = RunConfig(
            data, backbone, objective=DiscreteTimeConfig(num_steps=size.diffusion_steps), training=training
        )
        if row.system in (MASKED, CAUSAL):
            config = replace(pretraining_of(base, decoder=row.is_causal), data=data, training=training)
        else:
            if row.start is not None:
                base = started_from(base, str(self.run_folder(row.start)))
            config = SYSTEMS[row.system].configure(base)
        own = self.best(row.candidates).objective if row.candidates else row.objective
        return replace(
            config,
            objective=self.changed(config.objective, own),
            time=config.time if row.time is None else row.time,
            training=replace(config.training, **dict(row.training)),
        )

    @property
    def vocabulary(self) -> str:
        """The tokenizer of all rows; one that is trained, is trained on the news."""
        wanted = self.size.vocabulary
        if isinstance(wanted, str):
            return wanted
        texts = self.corpus("news.train"), self.corpus("news.valid")
        news = DataConfig(*texts, vocabulary=wanted, max_length=self.size.max_length)
        own = self.output / "vocabulary"
        return str(build_once(own, lambda folder: prepare(news, self.cache).vocabulary.save(folder)))

    def changed(self, objective: Any, own: Settings | ObjectiveConfig) -> ObjectiveConfig:
        """An objective with other settings, or another one, over as many steps."""
        if isinstance(own, ObjectiveConfig):
            objective, own = own, (("num_steps", self.size.diffusion_steps),)
        return replace(objective, **dict(own))

    def trained(self, row: Row) -> Path:
        """The run of a row; trains or resumes it unless it is finished."""
        folder = RunFolder(self.run_folder(row.key))
        if folder.config.exists() and _essence(stored_config(folder.path)) != _essence(self.config(row)):
            raise SystemExit(f"{str(folder.path)!r} was begun with other settings than {row.key} has now; delete it")
        if not (is_finished(folder.path) and folder.model.is_dir()):
            resume = folder.config.exists()
            done = train(None if resume else self.config(row), folder.path, cache=self.cache, resume=resume)
            if done.is_stopped:
                raise SystemExit(f"{row.key} was stopped; the same command resumes it")
        shutil.rmtree(folder.checkpoints, ignore_errors=True)  # four times as large as the model
        return folder.path

    @property
    def cache(self) -> Path:
        return self.output / "cache"

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, row: Row) -> None:
        """Runs all evaluations of a row, except those already done."""
        todo = [one for one in row.evaluations if not (self.evaluation(row, one) / "evaluation.json").exists()]
        if not todo:
            return
        engine = load_engine(self.trained(row))
        own: Any = engine.config
        is_judged = any(one.judged for one in todo)
        judge = load_judge(str(self.run_folder(JUDGE) / "model"), engine.device) if is_judged else None
        for one in todo:
            engine.config = replace(own, objective=self.changed(own.objective, one.objective))
            has_likelihood = bool(engine.config.objective.scoring_quantities(engine.config.time).available)
            if not one.share and not has_likelihood:
                continue  # a system without a likelihood cannot score text
            texts = open_evaluation_set(engine, self.corpus(one.text), sentences=self.size.sentences)
            if one.text == "news.test":
                self.store_unigram_nats(engine, texts)
            with fast_products(engine.config.objective):
                wanted = self.measured(row, one, engine, has_likelihood=has_likelihood)
                found = evaluate(engine, texts, wanted, judge if one.judged else None)
            found.save(self.evaluation(row, one))

    def measured(self, row: Row, one: Evaluation, engine: Engine, *, has_likelihood: bool) -> Plan:
        """What to measure; all systems whose likelihoods are estimated alike share their noise."""
        draws = min(one.draws, self.size.max_draws)
        return Plan(
            one.sampling or SYSTEMS[row.system].sampling,
            max(2, round(one.share * self.size.samples)) if one.share and self.size.samples else 0,
            min(self.size.length, engine.max_length),
            EstimationBudget(None, draws, strata=min(16, draws // 2), seed=one.seed),
            conventions=one.conventions and has_likelihood,
            seed=one.seed,
            scored=one.scored,
            quantity=one.quantity,
            shared_noise=True,
        )

    def store_unigram_nats(self, engine: Engine, texts: EvaluationSet) -> None:
        """Stores the nats of the training text's token frequencies on the test text; systems below it use context."""
        file = self.output / "unigram" / "settings.json"
        if file.exists():
            return
        own = torch.tensor([token for number in texts.numbers for token in texts.sequences[number]])
        own = own[engine.statistics.allowed[own]]
        counts = engine.statistics.counts.double() + 1
        nats = float((counts.sum() / counts)[own].log().mean())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"nats_per_token": nats, "tokens": len(own)})

    def do(self, row: Row, workers: int) -> None:
        """Trains and evaluates a row, and records how long that took and what it was made from, the first time."""
        started, folder = time.monotonic(), self.trained(row)
        self.evaluate(row)
        if self.is_done(row):
            return
        record = {
            "seconds": time.monotonic() - started,
            "workers": workers,
            "tokens": row.tokens(self.size),
            "code": code_version().sha256,
            "data": read_json(RunFolder(folder).fingerprints)["training"],
            "weights": Weights.of(RunFolder(folder).model).sha256,
            "start": row.start and Weights.of(RunFolder(self.run_folder(row.start)).model).sha256,
        }
        self.record(row).parent.mkdir(parents=True, exist_ok=True)
        write_json(self.record(row), record)

    def account(self, row: Row, seconds: float) -> None:
        """Adds to a row's share of the GPU's time, also if it was stopped and will be resumed."""
        record, spent = self.record(row), self.record(row).with_suffix(".spent")
        seconds += float(spent.read_text(encoding="utf-8")) if spent.exists() else 0.0
        if record.exists():
            write_json(record, read_json(record) | {"gpu_seconds": seconds})
            spent.unlink(missing_ok=True)
        else:
            spent.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(spent, str(seconds).encode())


def _essence(config: RunConfig) -> RunConfig:
    """A configuration without what may differ between machines: folders and compilation."""
    texts = (Path(path or "").name.partition(".txt")[0] for path in (config.data.corpus, config.data.validation))
    backbone = config.backbone
    if isinstance(backbone, Pretrained):
        parts = Path(backbone.name_or_path).parts
        at = parts.index("runs", -3)  # GROUP/runs/NAME, or the model inside it
        backbone = Pretrained("/".join(parts[at - 1 : at + 2]))
    return replace(
        config,
        data=DataConfig(*texts, max_length=config.data.max_length),
        backbone=backbone,
        training=replace(config.training, compile=False),
    )


# ---- all rows -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Worker:
    """A process that does one row after another."""

    process: subprocess.Popen[str]
    row: Row | None = None
    """What it is doing; None if it waits for a row."""
    compiled: set[str] = field(default_factory=set)
    """The networks of the rows it has done, which it need not compile again."""
    share: float = 0.0
    """The seconds of the GPU that its row took: while three rows run, each takes a third."""

    def give(self, row: Row) -> None:
        """Starts a row; if the process has ended, `run` will notice."""
        assert self.process.stdin is not None
        self.row, self.share = row, 0.0
        self.compiled.add(row.network)
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{row.key}\n")
            self.process.stdin.flush()

    def release(self) -> Row | None:
        """The row that it had, if any; it may be given another one."""
        row, self.row = self.row, None
        return row


def run(
    output: Folder,
    text: Path,
    workers: int = 6,
    minutes: float = 25.0,
    only: tuple[str, ...] = (),
    size: str = "full",
    kept: Path | None = None,
    compile: bool = False,
) -> None:
    """Run the remaining rows, several in parallel, for a number of minutes; can be called again to continue.

    Args:
        output: The folder for runs and evaluations.
        text: The folder of the texts.
        workers: The number of processes.
        minutes: When to stop. A row that would not finish by then is not started.
        only: Groups of rows, or single ones as group/name; all by default.
        size: full, small (several training runs on two cores), or tiny for tests.
        kept: The kept rows that were run elsewhere; of these, only networks to start from are trained again.
        compile: Compile networks; a process compiles each kind of network once.
    """
    work, started = Work(output, text, SIZES[size], kept, compile), time.monotonic()
    finished, waiting = _planned(work, only)
    running: list[Worker] = []
    is_late, last = False, started
    while True:
        left = 60 * minutes - (time.monotonic() - started)
        possible = [one for one in waiting if finished.issuperset(one.needs) and work.is_ready(one)]
        idle = [worker for worker in running if worker.row is None]
        while idle or len(running) < workers:
            compiled = idle[-1].compiled if idle else set[str]()
            busy = sum(worker.row is not None for worker in running)
            sharing = min(workers, busy + len(possible))
            ready = [one for one in possible if _seconds(one, work.size, sharing, compiled) < left]
            if not ready:
                break
            worker = idle.pop() if idle else Worker(_begin(work, size, workers))
            running += [] if worker in running else [worker]
            one = min(ready, key=lambda row: row.network not in worker.compiled)  # of equals, the first
            possible.remove(one)
            waiting.remove(one)
            worker.give(one)
        if not any(worker.row for worker in running) and not (work.awaits_files and left > 0):
            break
        if left < 0 and not is_late:
            is_late = True
            for worker in running:
                worker.process.terminate()  # training then writes a checkpoint, which a second signal would prevent
        time.sleep(0.05 if size == "tiny" else 0.5)
        last, passed = (now := time.monotonic()), now - last
        busy = sum(worker.row is not None for worker in running)
        for worker in running:
            worker.share += passed / busy if worker.row else 0.0
        for worker in list(running):
            is_done = worker.row is not None and work.is_done(worker.row)
            if worker.process.poll() is not None:
                running.remove(worker)
            elif not is_done:
                continue
            if (row := worker.release()) is not None:
                work.account(row, worker.share)
                finished |= {row.key} if is_done else set()
                state = "done" if is_done else "not finished, see its log"
                print(f"{time.monotonic() - started:6.0f} s  {row.key}: {state}", flush=True)
    for worker in running:
        worker.process.communicate()  # without further rows it ends
    if waiting:
        print(f"not started: {', '.join(one.key for one in waiting)}", flush=True)


def _planned(work: Work, only: tuple[str, ...]) -> tuple[set[str], list[Row]]:
    """The rows that are finished, and those to run: what is wanted, and networks it needs that are elsewhere."""
    every = rows(work.size)
    for one in filter(work.is_done, every):
        if (tokens := read_json(work.record(one))["tokens"]) != one.tokens(work.size):
            raise SystemExit(
                f"{one.key} was trained on {tokens:,} tokens in {str(work.output)!r}, but its size is "
                f"{one.tokens(work.size):,} now; choose another folder"
            )
    if unknown := {*only} - {name for one in every for name in (one.group, one.key)}:
        raise SystemExit(f"no group or row is called {', '.join(sorted(unknown))}; `plan` lists all")
    finished = {one.key for one in every if work.is_done(one) or work.is_kept(one)}
    wanted = {one.key for one in every if not only or {one.group, one.key} & {*only}} - finished
    for one in reversed(every):  # a start may need another one
        if one.key in wanted:
            missing = {key for key in one.models if not work.has_model(key) and not work.is_arriving(key)}
            finished -= missing
            wanted |= missing
    chosen = [one for one in every if one.key in wanted]
    for one in chosen:
        work.record(one).unlink(missing_ok=True)  # its model is gone
    return finished, chosen


def _seconds(one: Row, size: Size, workers: int, compiled: set[str]) -> float:
    """How long a row takes if so many workers share the GPU, with compilation if its network is a new one."""
    starting = 0.0 if one.network in compiled or size.precision != "bf16" else STARTING
    return one.seconds(size) * workers + starting


def _begin(work: Work, size: str, workers: int) -> subprocess.Popen[str]:
    """Starts the process of a worker."""
    options = [f"--text={work.text}", f"--size={size}", f"--workers={workers}"]
    options += [f"--kept={work.kept}"] if work.kept else []
    options += ["--compile"] if work.compile else []
    compiled = str((work.cache / "compiled").absolute())
    own = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": compiled, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    return subprocess.Popen(
        [sys.executable, __file__, "work", str(work.output), *options],
        stdin=subprocess.PIPE,
        env=own | os.environ,
        text=True,
    )


def work(
    output: Folder,
    text: Path,
    size: str = "full",
    workers: int = 1,
    kept: Path | None = None,
    compile: bool = False,
) -> None:
    """Do the rows whose names are read from standard input, one per line; `run` starts several such processes."""
    set_verbosity("info")
    torch._dynamo.config.recompile_limit = 64  # all kinds of networks may come to one process
    own, every = Work(output, text, SIZES[size], kept, compile), {one.key: one for one in rows(SIZES[size])}
    for line in sys.stdin:
        row = every[line.strip()]
        log = own.output / row.group / "logs" / f"{row.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        own.do(row, workers)
        gc.collect()
        torch.cuda.empty_cache()  # what this process does not need, others may


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"plan": plan, "run": run, "work": work}, description=__doc__)
