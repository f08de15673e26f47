"""The experiment behind docs/results.md: run its rows, keep what a report needs, write tables and paired statistics.

    python benchmarks/experiment.py run experiment --scale 19m --workers 10 --data 'news.train-*.txt.xz' \
        --validation news.valid.txt.xz --test news.test.txt.xz --other-test lm1b.heldout.txt.xz \
        --masked masked --decoder decoder --pretraining-data 'wiki.train-*.txt.xz'
    python benchmarks/experiment.py keep experiment docs/results
    python benchmarks/experiment.py tables docs/results tables --pairs diffusionbert:d3pm diffusionbert-bell:decoder

`masked` and `decoder` are models from `diffusionbert pretrain --preset wiki-small`, the second with `--decoder`;
without `--pretraining-data` the larger network is left out. `run` skips what is finished, and its folders are those of
`diffusionbert reproduce`, which makes the other tables and figures (`reproduce table3 --output experiment/seed1 …`).
`keep` copies settings, logs, scores and a few samples, without weights. `tables` needs neither models nor corpora.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import time
import traceback
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro

from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.likelihood.intervals import paired_difference
from diffusionbert.reporting import set_verbosity
from diffusionbert.reproduce import Request
from diffusionbert.reproduce.reproduction import Reproduction
from diffusionbert.reproduce.targets import MAIN, TRADED_OFF, Row, tradeoff, write_table
from diffusionbert.storage.files import load_tensors, read_json, save_tensors, write_json
from diffusionbert.training.run import default_cache, train
from diffusionbert.training.run_folder import RunFolder

Folder = tyro.conf.Positional[Path]
BELL = "diffusionbert-bell"
CLAIMED = (
    *("diffusionbert", "d3pm-tad", "d3pm", "diffusionbert-spindle", "diffusionbert-lte", "diffusionbert-pte"),
    *("diffusionbert-spindle-paper", "d3pm-spindle", "decoder", "diffusion-lm", "diffusion-lm-bert", "bert-mouth"),
    *(BELL, "decoder-pretrained", "d3pm-spindle-paper"),
)
"""The systems on which claims rest: trained with three seeds."""
SCALED = ("diffusionbert", BELL, "genmd4", "d3pm", "decoder", "decoder-pretrained")
"""The systems that are also trained for fewer and for more steps."""


# ---- the rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One row: a system that is trained and evaluated in a folder, or its samples over sampler settings (figure 3)."""

    folder: str
    row: Row
    seed: int = 0
    steps: int | None = None
    scale: str | None = None
    """Another size of network, which is pretrained first."""
    is_tradeoff: bool = False
    training: tuple[tuple[str, object], ...] = ()
    objective: tuple[tuple[str, object], ...] = ()
    """Settings that differ from those of the preset and the system."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.folder}/{self.row.key}{'-tradeoff' if self.is_tradeoff else ''}"

    @property
    def needs(self) -> str | None:
        """The job that trains the model of this one, if it is another."""
        return f"{self.folder}/{self.row.system}" if self.is_tradeoff or self.row.note else None

    def record(self, output: Path) -> Path:
        """Says how long the job took; written when it is done."""
        return output / self.folder / "seconds" / f"{self.name.partition('/')[2]}.json"


def jobs() -> list[Job]:
    """All jobs: the longest first, so that none runs alone at the end, then the most important."""
    order = {name: number for number, name in enumerate(CLAIMED)}
    unaveraged, faster = (("ema", None),), (("learning_rate", 6e-4),)
    return [
        Job("steps16000", Row("decoder"), steps=16_000),  # as long as pretraining and fine-tuning together
        *(Job("larger", Row(name), steps=6000, scale="34m") for name in (BELL, "decoder")),
        *(Job("steps6000", Row(name), steps=6000) for name in (*SCALED, "d3pm-spindle")),
        *(Job("seed0", row) for row in sorted(MAIN, key=lambda row: order.get(row.system, len(order)))),
        *(Job("seed1", Row(name), seed=1) for name in CLAIMED),
        *(Job("steps600", Row(name), steps=600) for name in SCALED),
        *(Job("seed1", Row(name), seed=1, is_tradeoff=True) for name in TRADED_OFF),
        *(Job("seed2", Row(name), seed=2) for name in CLAIMED),
        *(Job("unaveraged", Row(name), training=unaveraged) for name in (BELL, "d3pm", "decoder")),
        *(Job("faster", Row(name), training=faster) for name in ("diffusionbert", BELL, "d3pm-spindle")),
        Job("narrower", Row("diffusion-lm"), objective=(("width", 16),)),
    ]


def do(job: Job, output: Path, request: Request, workers: int) -> float:
    """Trains and evaluates one row; returns the seconds it took."""
    set_verbosity("info")  # in a process of its own
    started = time.monotonic()
    request = replace(request, seed=job.seed, steps=job.steps)
    if job.scale is None:
        request = replace(request, pretraining_data=None)
    else:  # the larger network has the vocabulary of the others
        request = replace(request, scale=job.scale, vocabulary=request.masked, masked=None, decoder=None)
    reproduction = Reproduction(output / job.folder, request, default_cache())
    system, folder = job.row.system, RunFolder(reproduction.output / "runs" / job.row.system)
    if job.is_tradeoff:
        tradeoff(reproduction, system)
    else:
        if (job.training or job.objective) and not folder.config.exists():
            planned = reproduction.planned(system)
            training = replace(planned.training, **dict(job.training))
            objective = replace(planned.objective, **dict(job.objective))
            train(replace(planned, training=training, objective=objective), folder.path, cache=reproduction.cache)
        has_bleu = job.folder.startswith("seed")
        reproduction.evaluation(job.row.key, system, job.row.sampling, samples=None if has_bleu else 2)
        if job.folder == "seed0" and not job.row.note and request.other_test:
            reproduction.other_evaluation(system)
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
    seconds = time.monotonic() - started
    job.record(output).parent.mkdir(parents=True, exist_ok=True)
    write_json(job.record(output), {"seconds": seconds, "workers": workers})  # which share the GPU
    return seconds


def do_apart(job: Job, output: Path, request: Request, workers: int) -> float:
    """Runs a job in a process of its own, which frees its memory; a crash costs one job."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(do, job, output, request, workers).result()


def run(
    output: Folder, request: tyro.conf.OmitArgPrefixes[Request], workers: int = 8, minutes: float = math.inf
) -> None:
    """Run all jobs, several at once; start none after so many minutes."""
    if request.masked is None or request.decoder is None:
        raise SystemExit("--masked and --decoder are missing; jobs that run at once must not pretrain the same network")
    started = time.monotonic()
    wanted = [job for job in jobs() if request.pretraining_data or job.scale is None]
    finished = {job.name for job in wanted if job.record(output).exists()}
    waiting = [job for job in wanted if job.name not in finished]
    running: dict[Future[float], Job] = {}
    with ThreadPoolExecutor(workers) as pool:
        while True:
            is_late = time.monotonic() - started > 60 * minutes
            ready = [] if is_late else [job for job in waiting if job.needs is None or job.needs in finished]
            for job in ready[: workers - len(running)]:
                waiting.remove(job)
                running[pool.submit(do_apart, job, output, request, workers)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, error = running.pop(future), future.exception()
                if error is None:
                    finished.add(job.name)
                report = f"{future.result():.0f} s" if error is None else "".join(traceback.format_exception(error))
                print(f"{time.monotonic() - started:6.0f} s  {job.name}: {report}", flush=True)
    if waiting:
        print(f"not started: {', '.join(job.name for job in waiting)}", flush=True)


# ---- what is committed ----------------------------------------------------------------------------------------------


def keep(source: Folder, target: Folder) -> None:
    """Copy settings, logs, scores in single precision and 20 samples per evaluation; `runs` becomes `trained`.

    What all systems share of an evaluation set goes to sentences/HASH.safetensors, once.
    """
    (target / "sentences").mkdir(parents=True, exist_ok=True)
    for name in (
        "settings.json",
        "seconds/*.json",
        "runs/*/run.json",
        "runs/*/experiment.json",  # of earlier versions
        "runs/*/log.jsonl",
        "pretrained/*/log.jsonl",
    ):
        for path in source.glob(f"*/{name}"):
            copy = target / str(path.relative_to(source)).replace("/runs/", "/trained/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for path in source.glob("*/evaluations/*/evaluation.json"):
        copy, report = target / path.parent.relative_to(source), read_json(path)
        copy.mkdir(parents=True, exist_ok=True)
        tensors = load_tensors(path.with_name("scores.safetensors")).items()
        small = {name: one.float() if one.is_floating_point() else one.int() for name, one in tensors}
        shared = {name: small.pop(name) for name in ("bytes", "example", "tokens", "words") if name in small}
        if shared:
            data = b"".join(name.encode() + one.numpy().tobytes() for name, one in shared.items())
            report["sentences"] = hashlib.sha256(data).hexdigest()[:16]
            save_tensors(shared, target / "sentences" / f"{report['sentences']}.safetensors")
        own = {name: one for name, one in small.items() if not name.startswith("draw_variance.")}
        save_tensors(own, copy / "scores.safetensors")
        write_json(copy / "evaluation.json", report)
        samples = path.with_name("samples.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        (copy / "samples.txt").write_text("".join(samples[:20]), encoding="utf-8")


def restore(kept: Path, sentences: Path, folder: Path) -> Path:
    """Writes a kept evaluation as `evaluate` does; variances over draws, which were not kept, are NaN."""
    shutil.copytree(kept, folder)
    (folder / "samples.txt").touch()
    report = read_json(folder / "evaluation.json")
    if name := report.pop("sentences", None):
        write_json(folder / "evaluation.json", report)
        tensors = load_tensors(folder / "scores.safetensors") | load_tensors(sentences / f"{name}.safetensors")
        nats = [name for name in tensors if name.startswith("nats.")]
        tensors |= {name.replace("nats", "draw_variance"): torch.full_like(tensors[name], torch.nan) for name in nats}
        wide = {name: one.double() if one.is_floating_point() else one.long() for name, one in tensors.items()}
        save_tensors(wide, folder / "scores.safetensors")
    return folder


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables(source: Folder, output: Folder, pairs: tuple[str, ...] = ()) -> None:
    """Write one table per folder and evaluation set, and the paired differences of rows (`first:second`) in each."""
    groups: dict[str, dict[str, Path]] = defaultdict(dict)
    differences = []
    with TemporaryDirectory() as scratch:
        for path in sorted(source.glob("*/evaluations/*/evaluation.json")):
            folder, row = path.parts[-4], path.parts[-2]
            suffix = re.search(r"-(other-text|\d+-steps|[kT]=[\d.]+)$", row)
            group = (
                folder if suffix is None else f"{folder}-{'other-text' if suffix[1] == 'other-text' else 'settings'}"
            )
            groups[group][row] = restore(path.parent, source / "sentences", Path(scratch) / folder / row)
        output.mkdir(parents=True, exist_ok=True)
        for name, rows in groups.items():
            write_table(output / name, compare(list(rows.values())))
            for first, _, second in (pair.partition(":") for pair in pairs):
                if first in rows and second in rows:
                    differences += differences_of(name, rows[first], rows[second])
    write_json(output / "paired.json", differences)
    lines = [list(differences[0]), ["---"] * len(differences[0])] if differences else []
    for one in differences:
        lines += [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in one.values()]]
    (output / "paired.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")


def differences_of(folder: str, *rows: Path) -> list[dict[str, Any]]:
    """The first's nats per token minus the second's on the same sentences, for each likelihood that both have.

    If they have none in common, their own ones are compared: a bound minus an exact value bounds the difference from
    above. Where protocols or estimators differ, noise is not shared and the interval contains both.
    """
    names, (first, second) = [row.name for row in rows], [EvaluationResult.load(row) for row in rows]
    common = [(name, name) for name in first.scores if name in second.scores]
    found = []
    for pair in common or [(next(iter(first.scores)), next(iter(second.scores)))]:
        one, two = first.scores[pair[0]], second.scores[pair[1]]
        if not torch.equal(one.example, two.example):
            raise ValueError(f"{folder}: {names[0]} and {names[1]} have different sentences")
        counts = one.tokens.double().numpy(), two.tokens.double().numpy()
        change = paired_difference((one.nats.numpy(), two.nats.numpy()), counts)
        cards = [asdict(one.likelihoods[name].protocol) for one, name in zip((first, second), pair, strict=True)]
        differ = [key for key in cards[0] if key != "weights" and cards[0][key] != cards[1][key]]
        found.append(
            {
                "folder": folder,
                "first": names[0],
                "second": names[1],
                "quantity": " - ".join(dict.fromkeys(pair)),
                "kind": " - ".join(dict.fromkeys((one.kind.value, two.kind.value))),
                "sentences": len(one),
                "unit": "nats per token",
                **asdict(change),
                "perplexity_ratio": math.exp(change.value),
                "protocols_differ_in": ", ".join(differ) or "–",
            }
        )
    return found


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "keep": keep, "tables": tables}, description=__doc__)
