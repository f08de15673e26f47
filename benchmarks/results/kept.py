"""What the experiment left behind, without weights: packed into docs/results, unpacked for a report, and read.

    docs/results/
      sentences/HASH.safetensors     names, tokens, words and bytes of the sentences of a text, which all rows share
      seed0, seed1, …, steps600, …   as in the experiment's folder: settings.json, evaluations/KEY, seconds/KEY.json,
                                     table1.json, figure2.json; `runs` is called `trained` here; of what was pretrained
                                     on the way, the log
      alone/                         the short runs that were timed, and what word frequencies alone would do

`pack` leaves out weights, draws, all but a few samples, and most lines of the logs. `unpack` gives back the layout of
`diffusionbert.paper.reproduction`, so that whatever reads an experiment reads what was kept of it, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from plan import FREQUENCIES, jobs
from torch import Tensor

from diffusionbert.assessment.report import Evaluation, file_hash, read_evaluation
from diffusionbert.checkpoints import RunFolder, load_tensors, read_json, save_tensors
from diffusionbert.experiments import Experiment
from diffusionbert.likelihood.scores import Scores
from diffusionbert.paper.reproduction import is_finished
from diffusionbert.paper.targets import MAIN
from diffusionbert.runs import stored_experiment

SHARED = ("example", "tokens", "words", "bytes")
"""Of each sentence, whatever the system."""
NUM_SAMPLES = 20
LOG_EVERY = 5
"""Of the lines that a log has between validations, one of so many is kept; and the last, which counts all tokens.
All of those of runs that were timed."""
SMALL = {torch.float64: torch.float32, torch.int64: torch.int32}
_ABSOLUTE = re.compile(r"(?<![\w.*?\]/-])~?/[\w.-]+/[^\s\"']*")


# ---- packing --------------------------------------------------------------------------------------------------------


def pack(source: Path, target: Path) -> None:
    """Copies what a report needs; what was kept before and is not in the source stays."""
    folders = sorted(path.parent for path in source.glob("*/runs"))
    if not folders:
        raise ValueError(f"{str(source)!r} holds no folder with runs; give what benchmarks/experiment.py wrote")
    for path in (path for folder in folders for path in _texts(folder)):
        require_relative(path)
    for folder in folders:
        kept = target / folder.name
        _require_same_settings(folder, kept)
        for run in filter(is_finished, sorted((folder / "runs").iterdir())):
            _write(kept / "trained" / run.name / "experiment.json", read_json(run / "experiment.json"))
            _pack_log(run, kept / "trained" / run.name, every=1 if folder.name == "alone" else LOG_EVERY)
        for log in sorted(folder.glob("pretrained/*/log.jsonl")):
            _pack_log(log.parent, kept / "pretrained" / log.parent.name, LOG_EVERY)
        for evaluation in sorted(folder.glob("evaluations/*/evaluation.json")):
            has_samples = folder.name == "seed0" and evaluation.parent.name in {row.key for row in MAIN}
            _pack_evaluation(evaluation.parent, kept / "evaluations" / evaluation.parent.name, has_samples)
        for seconds in sorted(folder.glob("seconds/*.json")):
            if not (kept / "seconds" / seconds.name).exists():
                _write(kept / "seconds" / seconds.name, read_json(seconds))
        for name in ("settings.json", "table1.json", "figure2.json", FREQUENCIES):
            if (folder / name).exists():
                _write(kept / name, read_json(folder / name))


def require_relative(path: Path) -> None:
    """Refuses a file that names a place on somebody's machine."""
    found = _ABSOLUTE.search(path.read_text(encoding="utf-8"))
    if found:
        raise ValueError(
            f"{str(path)!r} names the place {found.group()!r} of one machine; run the experiment with relative paths"
        )


def _texts(folder: Path) -> Iterator[Path]:
    names = "*.json", "runs/*/experiment.json", "runs/*/log.jsonl", "pretrained/*/log.jsonl"
    for pattern in (*names, "evaluations/*/evaluation.json"):
        yield from folder.glob(pattern)


def _require_same_settings(folder: Path, kept: Path) -> None:
    paths = [path / "settings.json" for path in (folder, kept)]
    if all(path.exists() for path in paths) and _said(paths[0]) != _said(paths[1]):
        raise ValueError(f"{str(folder)!r} has other settings than {str(kept)!r}; remove the latter to keep it instead")


def _said(settings: Path) -> dict[str, Any]:
    """Without what was not asked for: a later version may offer more to ask."""
    return {name: value for name, value in read_json(settings).items() if value is not None}


def _pack_log(run: Path, kept: Path, every: int) -> None:
    events = RunFolder(run).events()
    losses = [event for event in events if "loss" in event]
    chosen = {id(event) for event in (*losses[every - 1 :: every], losses[-1])} if losses else set()
    lines = [json.dumps(event) for event in events if "loss" not in event or id(event) in chosen]
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pack_evaluation(evaluation: Path, kept: Path, has_samples: bool) -> None:
    tensors = load_tensors(evaluation / "scores.safetensors")
    report = read_json(evaluation / "evaluation.json")
    shared = {name: _small(tensors.pop(name)) for name in SHARED if name in tensors}
    if shared:
        report["sentences"] = _fingerprint(shared)
        path = kept.parents[2] / "sentences" / f"{report['sentences']}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(shared, path)
    _write(kept / "evaluation.json", report)
    own = {name: _small(values) for name, values in tensors.items() if not name.startswith("draw_variance.")}
    save_tensors(own, kept / "scores.safetensors")
    if has_samples:
        lines = (evaluation / "samples.txt").read_text(encoding="utf-8").splitlines()[:NUM_SAMPLES]
        (kept / "samples.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def note_hashes(files: Sequence[Path], target: Path) -> None:
    """Notes the SHA-256 of files, by their names and, for weights, those of their folders."""
    found = {}
    for path in files:
        if not path.is_file():
            raise ValueError(f"{str(path)!r} is no file; give the files that the experiment was given")
        name = f"{path.parent.name}/{path.name}" if path.suffix == ".safetensors" else path.name
        found[name] = file_hash(path)
    _write(target / "given" / "sha256.json", dict(sorted(found.items())))


def _small(values: Tensor) -> Tensor:
    return values.to(SMALL.get(values.dtype, values.dtype))


def _fingerprint(tensors: dict[str, Tensor]) -> str:
    data = b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(data).hexdigest()[:16]


def _write(path: Path, value: Any) -> None:
    """JSON without white space: there are many files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


# ---- unpacking ------------------------------------------------------------------------------------------------------


def unpack(kept: Path, target: Path) -> None:
    """Gives back the layout of an experiment; the variances over draws, which were not kept, are NaN."""
    for path in sorted(kept.glob("*/**/*")):
        if path.is_file() and path.parts[len(kept.parts)] != "sentences":
            parts = ["runs" if part == "trained" else part for part in path.relative_to(kept).parts]
            copy = target.joinpath(*parts)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for path in sorted(target.glob("*/evaluations/*/evaluation.json")):
        report = read_json(path)
        path.with_name("samples.txt").touch()
        if "sentences" in report:
            own = load_tensors(path.with_name("scores.safetensors"))
            names = [name.partition(".")[2] for name in own if name.startswith("nats.")]
            own |= {f"draw_variance.{name}": torch.full_like(own[f"nats.{name}"], torch.nan) for name in names}
            own |= load_tensors(kept / "sentences" / f"{report['sentences']}.safetensors")
            wide = {small: large for large, small in SMALL.items()}
            save_tensors(
                {name: values.to(wide.get(values.dtype, values.dtype)) for name, values in own.items()},
                path.with_name("scores.safetensors"),
            )


# ---- reading --------------------------------------------------------------------------------------------------------


class NotRun(Exception):  # noqa: N818 - it is no error: experiments are finished in instalments
    """Something was asked for that was not run yet."""


@final
@dataclass(frozen=True)
class Results:
    """An experiment's folder, of which anything may be missing."""

    root: Path

    @property
    def folders(self) -> list[str]:
        """All that have runs."""
        return sorted(path.parent.name for path in self.root.glob("*/runs"))

    @property
    def seeds(self) -> list[str]:
        """The folders of seeds."""
        return sorted((path.name for path in self.root.glob("seed*")), key=lambda name: int(name.removeprefix("seed")))

    @property
    def budgets(self) -> dict[int, str]:
        """The folder of each number of training steps, seed 0 among them."""
        found = {int(path.name[5:]): path.name for path in self.root.glob("steps*") if path.name[5:].isdigit()}
        steps = {run.training.steps for run in self.experiments("seed0").values()}
        return dict(sorted((found | dict.fromkeys(steps, "seed0")).items()))

    def budget(self, steps: int, *keys: str) -> str:
        """The folder of a number of training steps that has all of these rows."""
        folder = self.budgets.get(steps)
        absent = [f"`{key}`" for key in keys if folder is None or not self.has(key, folder)]
        if folder is None or absent:
            raise NotRun(f"{' and '.join(absent)} in {steps:,} steps")
        return folder

    def has(self, key: str, folder: str = "seed0") -> bool:
        """Whether a row was evaluated."""
        return (self.root / folder / "evaluations" / key / "evaluation.json").exists()

    def keys(self, folder: str) -> list[str]:
        """All rows of a folder that were evaluated."""
        return sorted(path.parent.name for path in self.root.glob(f"{folder}/evaluations/*/evaluation.json"))

    def path(self, key: str, folder: str = "seed0") -> Path:
        """The folder of an evaluation."""
        return self.root / folder / "evaluations" / key

    def evaluation(self, key: str, folder: str = "seed0") -> Evaluation:
        """How a row did."""
        if not self.has(key, folder):
            raise NotRun(f"{folder}/{key}")
        return _read(self.path(key, folder))

    def scores(self, key: str, way: str, folder: str = "seed0") -> Scores:
        """The nats of a row by one way of scoring."""
        found = self.evaluation(key, folder).scores
        if way not in found:
            raise NotRun(f"{folder}/{key}: {way}")
        return found[way]

    def absent(self, *folders: str) -> list[str]:
        """What was planned in these folders, or in any, and is not at hand."""
        return [
            f"`{job.name}`"
            for job in jobs()
            if not folders or job.folder in folders
            if not (self.tradeoff(job.row.system, job.folder) if job.is_line else self.has(job.row.key, job.folder))
        ]

    def tradeoff(self, system: str, folder: str) -> dict[str, Evaluation]:
        """A system's samples at each setting of figure 3, by the knob."""
        found = {key: re.fullmatch(rf"{re.escape(system)}-([kT]=([\d.]+))", key) for key in self.keys(folder)}
        known = sorted((float(match[2]), match[1], key) for key, match in found.items() if match)
        return {knob: self.evaluation(key, folder) for _, knob, key in known}

    def over_steps(self, system: str, folder: str) -> dict[int, Evaluation]:
        """A system over each number of steps of table 3."""
        found = {key: re.fullmatch(rf"{re.escape(system)}-(\d+)-steps", key) for key in self.keys(folder)}
        known = sorted((int(match[1]), key) for key, match in found.items() if match)
        return {steps: self.evaluation(key, folder) for steps, key in known}

    def run(self, name: str, folder: str = "seed0") -> Path:
        """The run folder of a system."""
        path = self.root / folder / "runs" / name
        if not is_finished(path):
            raise NotRun(f"{folder}/{name}")
        return path

    def experiments(self, folder: str) -> dict[str, Experiment]:
        """What was trained in a folder."""
        return _experiments(self.root / folder / "runs")

    def tokens(self, name: str, folder: str) -> int:
        """How many a run was trained on."""
        events = RunFolder(self.run(name, folder)).events()
        return max((int(event["tokens"]) for event in events if "tokens" in event), default=0)

    def given(self) -> dict[str, str]:
        """The SHA-256 of each file that the experiment was given, as far as it was noted."""
        path = self.root / "given" / "sha256.json"
        return dict(read_json(path)) if path.exists() else {}

    def frequencies(self) -> float:
        """Nats a token of the tested text by word frequencies alone."""
        path = self.root / "alone" / FREQUENCIES
        if not path.exists():
            raise NotRun("word frequencies alone")
        return float(read_json(path)["nats_per_token"])

    def settings(self, folder: str = "seed0") -> dict[str, Any]:
        """What was asked for."""
        path = self.root / folder / "settings.json"
        if not path.exists():
            raise NotRun(folder)
        settings: dict[str, Any] = read_json(path)
        return settings

    def seconds(self, folder: str) -> dict[str, dict[str, float]]:
        """What each row took, by stages, and how many workers shared the chip."""
        return {path.stem: read_json(path) for path in sorted(self.root.glob(f"{folder}/seconds/*.json"))}


@cache
def _read(folder: Path) -> Evaluation:
    return read_evaluation(folder)


@cache
def _experiments(runs: Path) -> dict[str, Experiment]:
    paths = sorted(runs.glob("*/experiment.json"))
    return {path.parent.name: stored_experiment(path.parent) for path in paths if is_finished(path.parent)}


def nats_of(scores: Scores) -> float:
    """A token's."""
    return float(scores.nats.sum() / scores.tokens.sum())


def perplexity(scores: Scores) -> float:
    """A token's."""
    return exp(nats_of(scores))


def exp(nats: float) -> float:
    """What may be beyond a float."""
    return math.exp(nats) if nats < 700 else math.inf
