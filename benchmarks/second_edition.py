"""The second edition of the experiment behind docs/results.md: its rows as a list, a plan of what they cost, a runner.

    python benchmarks/second_edition.py plan                                    every row: tokens, GPU minutes
    python benchmarks/second_edition.py run experiment --text TEXT --minutes 28 --workers 6 --only starts rates
    python benchmarks/second_edition.py run experiment --text TEXT --minutes 28 --workers 6
    python benchmarks/experiment.py keep experiment docs/results/second
    python benchmarks/report.py docs/results/second docs/results/tables

`TEXT` is a folder with news.train-*.txt.xz, news.valid, news.test, wiki.train-*, wiki.valid and lm1b.heldout. `run`
does what is not done yet, several rows side by side, in processes of their own with logs of their own (GROUP/logs). A
row that was stopped is resumed, and an evaluation that exists is kept, so that the list can be run in pieces.

All rows have the layers of ModernBERT (GROUP `bert`: of BERT and GPT-2), one size, one vocabulary, one batch size and
AdamW; each kind of network has the learning rate that was best for it in a search of equal size (`RATES`) on one cell:
that kind's plainest system, a quarter of the usual tokens, seed 0, by the last validation. Noise is shared: every
likelihood is estimated by stratified times with as many draws and one evaluation seed.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from diffusionbert.diffusion.schedules import Cosine, Spindle, Sqrt
from diffusionbert.diffusion.time_sampling import Bell
from diffusionbert.evaluation.dataset import EvaluationSet, open_evaluation_set
from diffusionbert.evaluation.evaluate import Plan, evaluate
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.likelihood.estimate import EstimationBudget, fast_products
from diffusionbert.networks.loading import NewBert, of_family
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.recipes import SYSTEMS, Start, pretraining_of, started_from
from diffusionbert.reporting import set_verbosity
from diffusionbert.reproduce.reproduction import is_finished
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.storage.files import write_json
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.log import ValidationEvent, events_of
from diffusionbert.training.model_folder import BUNDLED
from diffusionbert.training.optim import fitting_ema
from diffusionbert.training.run import train
from diffusionbert.training.run_folder import RunFolder

Settings = tuple[tuple[str, Any], ...]
"""Fields of a dataclass and their values."""
Folder = tyro.conf.Positional[Path]

# ---- sizes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    layers: int = 7
    width: int = 384
    heads: int = 6
    batch_tokens: int = 16_384
    tokens: int = 32_768_000
    """Of a usual row: 2,000 steps."""
    vocabulary: str | int = str(BUNDLED)
    max_length: int = 128
    diffusion_steps: int = 512
    sentences: int = 2000
    samples: int = 1000
    length: int = 64
    max_draws: int = 512
    precision: str = "bf16"


SIZES = {
    "full": Size(),
    "tiny": Size(1, 32, 2, 256, 1024, 512, 24, 8, sentences=4, samples=2, length=6, max_draws=4, precision="no"),
}
"""`tiny` is for tests."""
MASKED, CAUSAL = "masked", "causal"
SPEED = 2.1e6
"""Tokens per second of training the full size on one H200; a causal network is faster, some objectives are slower."""
COST = {"genmd4": 2.5, "diffusion-lm": 1.5, "sundae": 2.0, "bert-mouth": 1.2, "d3pm-uniform": 1.4, "multinomial": 1.4}
"""Times as long as the usual row."""
STARTING, SCORING = 20.0, 6e6
"""Seconds until a process trains; tokens per second of scoring."""
RATES = (5e-4, 1e-3, 2e-3)
"""The learning rates of the search."""

# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a row."""

    name: str = ""
    """Of its folder, after that of the row."""
    text: str = "news.test"
    draws: int = 64
    seed: int = 0
    quantity: str | None = None
    samples: bool = False
    scored: bool = True
    sampling: SamplingRequest | None = None
    judged: bool = False
    conventions: bool = False


@dataclass(frozen=True)
class Row:
    """One model: what is trained, from what, for how long, and how it is evaluated."""

    group: str
    name: str
    system: str
    """A name in `SYSTEMS`, or `masked` or `causal` for pretraining."""
    start: str | None = None
    """The row it starts from, as group/name."""
    uses: str | None = None
    """The row whose model is evaluated, in place of training one."""
    text: str = "news"
    share: float = 1.0
    """Of the usual number of tokens."""
    seed: int = 0
    backbone: str = "modern"
    rate: float | None = None
    """The learning rate; None is the one chosen by the search."""
    objective: Settings = ()
    time: TimeEmbedding | None = None
    training: Settings = ()
    evaluations: tuple[Evaluation, ...] = (Evaluation(),)

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def is_causal(self) -> bool:
        return self.system == CAUSAL or (self.system in SYSTEMS and SYSTEMS[self.system].objective.is_causal)

    @property
    def kind(self) -> str:
        """The kind of network, by which its learning rate is chosen."""
        start = "new" if self.start is None else "pretrained"
        return f"{self.backbone}-{CAUSAL if self.is_causal else MASKED}-{start}"

    @property
    def needs(self) -> tuple[str, ...]:
        """The rows that must be done before."""
        if self.uses is not None:
            return (self.uses,)
        searched = () if self.rate is not None else tuple(row.key for row in searches() if row.kind == self.kind)
        return (*(() if self.start is None else (self.start,)), *searched)

    def tokens(self, size: Size) -> int:
        return 0 if self.uses is not None else round(self.share * size.tokens)

    def seconds(self, size: Size) -> float:
        """Estimated for one H200, without the start of its process, during which others compute."""
        factor = COST.get(self.system, 0.8 if self.is_causal else 1.0)
        scored = sum(35 * size.sentences * one.draws for one in self.evaluations if one.scored)
        sampled = sum(5.0 for one in self.evaluations if one.samples)
        return factor * self.tokens(size) / SPEED + scored / SCORING + sampled


LM1B = Evaluation("lm1b", "lm1b.heldout", conventions=True)
USUAL = (Evaluation(samples=True), LM1B)
"""What the main rows are evaluated by."""
PRECISE = (Evaluation(draws=512), LM1B)
"""Where a claim depends on a small difference."""


def starts() -> list[Row]:
    """Pretraining with equal budgets: masked and causal, on another text and on the same."""
    return [
        Row(
            "starts",
            f"{kind}-wiki-{backbone}",
            kind,
            text="wiki",
            share=8.0,
            backbone=backbone,
            rate=1e-3,
            evaluations=(),
        )
        for backbone in ("modern", "bert")
        for kind in (MASKED, CAUSAL)
    ]


def searches() -> list[Row]:
    """The learning rates of each kind of network, on its plainest system."""
    systems = {
        (MASKED, "new"): "d3pm-tad",
        (MASKED, "pretrained"): "diffusionbert",
        (CAUSAL, "new"): "decoder",
        (CAUSAL, "pretrained"): "decoder-pretrained",
    }
    return [
        Row(
            "rates",
            f"{backbone}-{system}-{rate:g}",
            system,
            None if start == "new" else f"starts/{kind}-wiki-{backbone}",
            share=0.25,
            backbone=backbone,
            rate=rate,
            evaluations=(),
        )
        for backbone in ("modern", "bert")
        for (kind, start), system in systems.items()
        for rate in RATES
    ]


def _start(system: str, backbone: str = "modern") -> str | None:
    start = SYSTEMS[system].start
    return None if start is Start.SCRATCH else f"starts/{CAUSAL if start is Start.DECODER else MASKED}-wiki-{backbone}"


def _row(group: str, system: str, name: str | None = None, **changes: Any) -> Row:
    backbone = changes.get("backbone", "modern")
    return Row(group, name or system, system, **{"start": _start(system, backbone), **changes})


def main_rows(seed: int) -> list[Row]:
    """The paper's main rows: LTE both ways, the hybrid term both ways."""
    group, hybrid, plain = f"seed{seed}", (("hybrid", 0.01),), (("hybrid", 0.0),)
    changes: dict[str, Any] = {"seed": seed, "evaluations": USUAL}
    random = {**changes, "time": TimeEmbedding.LAYERS_RANDOM}
    return [
        _row(group, "diffusionbert", **changes),
        _row(group, "diffusionbert", "diffusionbert-hybrid", objective=hybrid, **changes),
        _row(group, "diffusionbert-lte", **changes),
        _row(group, "diffusionbert-lte", "diffusionbert-lte-random", **random),
        _row(group, "diffusionbert-pte", **changes),
        _row(group, "diffusionbert-spindle", **changes),
        _row(group, "diffusionbert-spindle-paper", **changes),
        _row(group, "diffusionbert-bell", **changes),
        _row(group, "d3pm", **changes),
        _row(group, "d3pm", "d3pm-lte-random", **random),
        _row(group, "d3pm-tad", **changes),
        _row(group, "d3pm-tad", "d3pm-tad-plain", objective=plain, **changes),
        _row(group, "d3pm-spindle", **changes),
        _row(group, "decoder", **changes),
        _row(group, "decoder-pretrained", **changes),
    ]


def bert_rows() -> list[Row]:
    """Four of them on BERT and GPT-2."""
    systems = "diffusionbert", "d3pm-tad", "decoder", "decoder-pretrained"
    return [_row("bert", system, backbone="bert") for system in systems]


def peers() -> list[Row]:
    """The other systems, once."""
    systems = "mdlm", "mdlm-pretrained", "oa-ardm", "cmlm", "sundae", "bert-mouth", "multinomial", "d3pm-uniform"
    # Those without a likelihood, or with a pseudo one, are judged by their samples.
    return [_row("peers", system, evaluations=USUAL) for system in systems]


CURVE = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Total tokens, pretraining counted, as shares of the usual number: a factor of 32."""


def curve() -> Iterator[Row]:
    """The bound against total tokens; what is pretrained has half of them, each total its own schedules."""
    for share in CURVE:
        changes: dict[str, Any] = {"evaluations": (Evaluation(),)}
        yield _row("curve", "d3pm-tad", f"d3pm-{share:g}", share=share, objective=(("hybrid", 0.0),), **changes)
        yield _row("curve", "decoder", f"causal-{share:g}", share=share, **changes)
        for text, name in (("wiki", "other-text"), ("news", "same-text")):
            label = f"masked-{text}-{share / 2:g}"
            start = Row("curve", label, MASKED, text=text, share=share / 2, rate=1e-3, evaluations=())
            yield start
            yield _row("curve", "diffusionbert", f"{name}-{share:g}", start=start.key, share=share / 2, **changes)


def spindle() -> Iterator[Row]:
    """λ under the strict bound, with uniform and with bell-shaped times, beside GenMD4."""
    for bell in (False, True):
        times = (("time_sampling", Bell(0.8, weighted=False)),) if bell else ()
        for strength in (0.0, 0.1, 0.3, 0.5):
            objective = (("schedule", Spindle(strength)), *times)
            name = f"lambda-{strength:g}{'-bell' if bell else ''}"
            yield _row("spindle", "diffusionbert-spindle", name, objective=objective, evaluations=PRECISE)
    yield _row("spindle", "genmd4", evaluations=PRECISE)


def orders() -> list[Row]:
    """Exact likelihoods in deterministic orders of unmasking, beside the bound."""
    exact = tuple(Evaluation(name, quantity=name, draws=32) for name in ("left-to-right", "confidence", "entropy"))
    return [
        _row("orders", system, uses=f"seed0/{system}", evaluations=(Evaluation(draws=512), *exact))
        for system in ("diffusionbert", "diffusionbert-bell", "d3pm-tad")
    ]


STEP_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Sampling steps of the frontier; BERT-Mouth and decoders generate one token per call."""


def frontier() -> list[Row]:
    """Samples over steps, and over temperatures where there are no steps, with a judge."""

    def one(name: str, request: SamplingRequest) -> Evaluation:
        return Evaluation(name, samples=True, scored=False, sampling=request, judged=True)

    by_steps = tuple(one(f"{n}-steps", SamplingRequest(config=SamplerConfig(n, top_k=30))) for n in STEP_COUNTS)
    gibbs = tuple(one(f"{n}-steps", SamplingRequest(Gibbs(), SamplerConfig(n, top_k=30))) for n in (64, 128, 256, 512))
    temperatures = (0.6, 0.7, 0.8, 0.9, 1.0)
    cooler = tuple(
        one(f"T={value}", SamplingRequest(config=SamplerConfig(temperature=value))) for value in temperatures
    )
    systems = {"diffusionbert": by_steps, "diffusionbert-spindle": by_steps, "d3pm-tad": by_steps}
    systems |= {"bert-mouth": gibbs, "decoder": cooler}
    return [
        _row("frontier", system, uses=f"{'peers' if system == 'bert-mouth' else 'seed0'}/{system}", evaluations=own)
        for system, own in systems.items()
    ]


def diffusion_lm() -> Iterator[Row]:
    """Diffusion-LM until it beats word frequencies: width of the vectors, schedule, number of steps."""
    for width in (16, 64, 128):
        for schedule, floor in ((Cosine(), 1e-4), (Sqrt(), 0.01)):
            objective = (("width", width), ("schedule", schedule), ("floor", floor), ("num_steps", 2000))
            label = f"width-{width}-{type(schedule).__name__.lower()}"
            yield _row("diffusion-lm", "diffusion-lm", label, objective=objective, share=2.0)
    fewer = (("width", 128), ("num_steps", 200))
    yield _row("diffusion-lm", "diffusion-lm", "width-128-200-steps", objective=fewer, share=2.0)


def rows() -> list[Row]:
    """All rows, each after those it needs."""
    return [
        *starts(),
        *searches(),
        *(row for seed in range(3) for row in main_rows(seed)),
        *bert_rows(),
        *curve(),
        *spindle(),
        *orders(),
        *peers(),
        *frontier(),
        *diffusion_lm(),
        _evaluation_seeds(),
    ]


def _evaluation_seeds() -> Row:
    """What another evaluation seed changes, with one training."""
    evaluations = tuple(Evaluation(f"draws-{seed}", seed=seed) for seed in range(3))
    return _row("noise", "diffusionbert", uses="seed0/diffusionbert", evaluations=evaluations)


# ---- the plan -------------------------------------------------------------------------------------------------------


def plan(only: tuple[str, ...] = (), size: str = "full") -> None:
    """Print every row with its tokens and estimated GPU minutes on one H200."""
    chosen = [row for row in rows() if not only or row.group in only]
    total, by_group = 0.0, dict.fromkeys((row.group for row in chosen), 0.0)
    print(f"{'row':<42} {'system':<30} {'start':<28} {'tokens':>9}  {'evaluations':>11}  GPU minutes")
    for row in chosen:
        minutes = row.seconds(SIZES[size]) / 60
        total, by_group[row.group] = total + minutes, by_group[row.group] + minutes
        millions = f"{row.tokens(SIZES[size]) / 1e6:.1f}M" if row.uses is None else "–"
        start = row.start or (f"model of {row.uses}" if row.uses else "–")
        print(f"{row.key:<42} {row.system:<30} {start:<28} {millions:>9}  {len(row.evaluations):>11}  {minutes:11.2f}")
    print()
    for group, minutes in by_group.items():
        print(f"{group:<14} {sum(row.group == group for row in chosen):>3} rows {minutes:7.1f} GPU minutes")
    starting = STARTING * len(chosen) / 60
    print(f"{'together':<14} {len(chosen):>3} rows {total:7.1f} GPU minutes; {starting:.1f} of starting, side by side")


# ---- one row --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Where rows are trained and on what."""

    output: Path
    text: Path
    size: Size = field(default_factory=Size)

    def corpus(self, name: str) -> str:
        """The files of a text by its name, such as news.train or lm1b.heldout; several are one glob."""
        found = sorted(self.text.glob(f"{name}*.txt*"))
        if not found:
            raise SystemExit(f"{str(self.text)!r} has no {name}*.txt*; give the folder of the texts")
        return str(found[0]) if len(found) == 1 else str(self.text / f"{name}-*.txt*")

    def run_folder(self, key: str) -> Path:
        group, name = key.split("/")
        return self.output / group / "runs" / name

    def record(self, row: Row) -> Path:
        """Says how long a row took; written when it is done."""
        return self.output / row.group / "seconds" / f"{row.name}.json"

    def evaluation(self, row: Row, one: Evaluation) -> Path:
        return self.output / row.group / "evaluations" / (row.name + (f"-{one.name}" if one.name else ""))

    # ---- training ---------------------------------------------------------------------------------------------------

    def rate(self, row: Row) -> float:
        """The row's own learning rate, or the best of the search for its kind of network."""
        if row.rate is not None:
            return row.rate
        found = {}
        for other in searches():
            if other.kind == row.kind and other.rate is not None:
                events = events_of(RunFolder(self.run_folder(other.key)).log, ValidationEvent)
                last = events[-1].nats_per_token if events else None
                found[other.rate] = math.inf if last is None else last
        return min(found, key=lambda rate: found[rate])

    def config(self, row: Row) -> RunConfig:
        """What is trained."""
        size, steps = self.size, max(1, row.tokens(self.size) // self.size.batch_tokens)
        every = max(1, steps // 4)
        training = TrainingConfig(
            steps=steps, batching=TokenBudget(size.batch_tokens), learning_rate=self.rate(row), warmup=steps // 10,
            ema=fitting_ema(steps), precision=size.precision, seed=row.seed, log_every=max(1, steps // 40),
            validate_every=every, validation_sentences=1024, validation_draws=8, save_every=every,
        )  # fmt: skip
        data = DataConfig(
            self.corpus(f"{row.text}.train"),
            self.corpus(f"{row.text}.valid"),
            vocabulary=size.vocabulary,
            max_length=size.max_length,
        )
        backbone = of_family(NewBert(size.layers, size.width, size.heads, dropout=0.0), row.backbone)
        base = RunConfig(
            data, backbone, objective=DiscreteTimeConfig(num_steps=size.diffusion_steps), training=training
        )
        if row.system in (MASKED, CAUSAL):
            config = replace(pretraining_of(base, decoder=row.is_causal), data=data, training=training)
        else:
            system = SYSTEMS[row.system]
            if row.start is not None:
                base = started_from(base, str(self.run_folder(row.start)))
            config = system.configure(base)
        changed: Any = config.objective
        return replace(
            config,
            objective=replace(changed, **dict(row.objective)),
            time=config.time if row.time is None else row.time,
            training=replace(config.training, **dict(row.training)),
        )

    def trained(self, row: Row) -> Path:
        """The run of a row, trained or resumed unless it is finished."""
        if row.uses is not None:
            return self.run_folder(row.uses)
        folder = self.run_folder(row.key)
        if not is_finished(folder):
            resume = RunFolder(folder).config.exists()
            done = train(None if resume else self.config(row), folder, cache=self.output / "cache", resume=resume)
            if done.is_stopped:
                raise SystemExit(f"{row.key} was stopped; the same command resumes it")
        return folder

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, row: Row) -> None:
        """Evaluates a row in all its ways, except those that are done."""
        todo = [one for one in row.evaluations if not (self.evaluation(row, one) / "evaluation.json").exists()]
        if not todo:
            return
        engine = load_engine(self.trained(row))
        for one in todo:
            number = self.size.samples if one.samples else 0
            sampling = one.sampling or (SYSTEMS[row.system].sampling if row.system in SYSTEMS else SamplingRequest())
            draws = min(one.draws, self.size.max_draws)
            budget = EstimationBudget(None, draws, strata=min(16, draws // 2), seed=one.seed)
            has_likelihood = bool(engine.config.objective.scoring_quantities(engine.config.time).available)
            if not number and not has_likelihood:
                continue  # a system without a likelihood has nothing to say of a text
            wanted = Plan(
                sampling,
                number,
                min(self.size.length, engine.max_length),
                budget,
                conventions=one.conventions and has_likelihood,
                seed=one.seed,
                scored=one.scored,
                quantity=one.quantity,
                shared_noise=True,
            )
            folder = str(self.run_folder("starts/causal-wiki-modern") / "model")
            judge = load_judge(folder, engine.device) if one.judged else None
            texts = open_evaluation_set(engine, self.corpus(one.text), sentences=self.size.sentences)
            if one.text == "news.test":
                self.store_word_entropy(engine, texts)
            with fast_products():
                evaluate(engine, texts, wanted, judge).save(self.evaluation(row, one))

    def store_word_entropy(self, engine: Engine, texts: EvaluationSet) -> None:
        """What word frequencies of the training text alone need on the test text; systems below it use context."""
        file = self.output / "words" / "settings.json"
        if file.exists():
            return
        own = torch.tensor([token for number in texts.numbers for token in texts.sequences[number]])
        own = own[engine.statistics.allowed[own]]
        counts = engine.statistics.counts.double() + 1
        nats = float((counts.sum() / counts)[own].log().mean())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"nats_per_token": nats, "tokens": len(own)})

    def do(self, row: Row, workers: int) -> None:
        """Trains and evaluates a row, and says how long that took."""
        started = time.monotonic()
        self.evaluate(row) if row.evaluations else self.trained(row)
        self.record(row).parent.mkdir(parents=True, exist_ok=True)
        write_json(
            self.record(row),
            {"seconds": time.monotonic() - started, "workers": workers, "tokens": row.tokens(self.size)},
        )


def row(output: Folder, key: tyro.conf.Positional[str], text: Path, size: str = "full", workers: int = 1) -> None:
    """Train and evaluate one row, as `run` does in a process of its own."""
    set_verbosity("info")
    work = Work(output, text, SIZES[size])
    one = next((each for each in rows() if each.key == key), None)
    if one is None:
        raise SystemExit(f"there is no row {key!r}; `plan` lists all")
    work.do(one, workers)


def run(
    output: Folder,
    text: Path,
    workers: int = 6,
    minutes: float = 28.0,
    only: tuple[str, ...] = (),
    size: str = "full",
) -> None:
    """Run what is not done yet, several rows side by side; stop after so many minutes, to be called again."""
    work, started = Work(output, text, SIZES[size]), time.monotonic()
    waiting = [one for one in rows() if (not only or one.group in only) and not work.record(one).exists()]
    finished = {one.key for one in rows() if work.record(one).exists()}
    running: dict[subprocess.Popen[bytes], Row] = {}
    while True:
        is_late = time.monotonic() - started > 60 * minutes
        ready = [] if is_late else [one for one in waiting if finished.issuperset(one.needs)]
        for one in ready[: workers - len(running)]:
            waiting.remove(one)
            running[_begin(work, one, text, size, workers)] = one
        if not running:
            break
        if is_late:
            for process in running:
                process.terminate()  # a training writes a checkpoint
        time.sleep(0.05 if size == "tiny" else 0.5)
        for process in [process for process in running if process.poll() is not None]:
            one = running.pop(process)
            is_done = process.returncode == 0 and work.record(one).exists()
            finished |= {one.key} if is_done else set()
            state = "done" if is_done else "not finished, see its log"
            print(f"{time.monotonic() - started:6.0f} s  {one.key}: {state}", flush=True)
    if waiting:
        print(f"not started: {', '.join(one.key for one in waiting)}", flush=True)


def _begin(work: Work, one: Row, text: Path, size: str, workers: int) -> subprocess.Popen[bytes]:
    """A process of a row, which writes to a log of its own."""
    log = work.output / one.group / "logs" / f"{one.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    options = f"--text={text}", f"--size={size}", f"--workers={workers}"
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, __file__, "row", str(work.output), one.key, *options], stdout=file, stderr=file
        )


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"plan": plan, "run": run, "row": row}, description=__doc__)
