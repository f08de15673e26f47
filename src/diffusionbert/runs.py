"""Puts an experiment together and runs it: corpus → vocabulary → rows → method → trainer → run folder."""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from filelock import FileLock, Timeout
from torch import Tensor

from diffusionbert.batches import BatchPlan
from diffusionbert.building import Lexicon, build
from diffusionbert.checkpoints import RunFolder, read_json, require_writable, write_json, written_folder
from diffusionbert.errors import reason_of
from diffusionbert.experiments import Data, Experiment, Pretrained, from_json, to_json
from diffusionbert.hub import located
from diffusionbert.method import Method
from diffusionbert.model_folder import (
    Origin,
    backbone_of,
    learned_exponents,
    lexicon_of,
    restore_beside,
    write_model,
)
from diffusionbert.networks.loading import FILES, new_lm
from diffusionbert.text.cache import made_once
from diffusionbert.text.cleaning import Cleaning
from diffusionbert.text.corpus import Corpus, parse_corpus
from diffusionbert.text.encoded import Encoded, encode_corpus
from diffusionbert.text.sources import Split
from diffusionbert.text.vocabulary import Vocabulary, train_wordpiece
from diffusionbert.training.description import describe
from diffusionbert.training.recipe import measure, proposed
from diffusionbert.training.settings import Training
from diffusionbert.training.standing import Standing
from diffusionbert.training.trainer import Trainer


def default_cache() -> Path:
    """Where encoded corpora are kept: DIFFUSIONBERT_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("DIFFUSIONBERT_CACHE") or Path(base) / "diffusionbert")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus as a network sees it."""

    vocabulary: Vocabulary
    rows: Encoded
    validation: Encoded

    @property
    def lexicon(self) -> Lexicon:
        """What a method must know of it."""
        return lexicon_of(self.vocabulary, self.rows.counts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of all rows, for each split."""
        return {"training": self.rows.fingerprint, "validation": self.validation.fingerprint}


def open_corpus(data: Data, split: Split) -> Corpus:
    """One split of an experiment's data."""
    fields = [field for field in (data.field, data.target_field) if field]
    cleaning = Cleaning(lower=data.lower, detokenise=data.detokenise)
    return parse_corpus(data.corpus, split, validation=data.validation, fields=fields, cleaning=cleaning)


def prepare(data: Data, cache: Path, vocabulary: Vocabulary | None = None) -> Prepared:
    """Reads, tokenises and encodes what an experiment asks for; what was done before is opened at once.

    A `vocabulary` that is given takes the place of the one asked for.
    """
    vocabulary = vocabulary or _vocabulary(data, cache)
    rows, validation = (
        encode_corpus(open_corpus(data, split), vocabulary, cache, max_length=data.max_length)
        for split in (Split.TRAIN, Split.VALIDATION)
    )
    return Prepared(vocabulary, rows, validation)


def _vocabulary(data: Data, cache: Path) -> Vocabulary:
    if isinstance(data.vocabulary, str):
        return Vocabulary.load(data.vocabulary)
    corpus = open_corpus(data, Split.TRAIN)
    key = hashlib.sha256(f"wordpiece {corpus.fingerprint} {data.vocabulary} {data.lower}".encode()).hexdigest()
    trained = partial(train_wordpiece, corpus, data.vocabulary, lower=data.lower)
    return Vocabulary.load(made_once(cache / f"vocabulary-{key[:32]}", lambda folder: trained().save(folder)))


def started_from(experiment: Experiment, start: str) -> Experiment:
    """The experiment with another start: a run or model folder, a language model by name, or an original `.th` file.

    The start brings its own vocabulary.
    """
    start = str(RunFolder(Path(start)).left_model() or start)
    vocabulary = "bert-base-uncased" if start.endswith(".th") else start
    return replace(experiment, network=Pretrained(start), data=replace(experiment.data, vocabulary=vocabulary))


def stored_experiment(output: Path) -> Experiment:
    """The experiment of a run folder."""
    file = RunFolder(output).experiment
    plain = read_json(file)
    try:
        stored: Experiment = from_json(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{str(file)!r} does not describe a run ({reason_of(error)}); restore it, or choose another --output"
        ) from None
    return stored


@dataclass(frozen=True)
class Ending:
    """How a training ended, as one of its processes knows it."""

    standing: Standing
    speaks: bool
    """Whether this process says so, and acts, for all."""
    is_stopped: bool
    """Whether it was told to stop before its end."""


def train(
    experiment: Experiment | None, output: Path, cache: Path, resume: bool = False, measured: bool = False
) -> Ending:
    """Runs an experiment, or goes on with the one in the folder; `measured` measures the machine first."""
    run = RunFolder(output)
    require_writable(output)
    stored = stored_experiment(output) if resume else None
    if stored is not None:
        experiment = stored if experiment is None else replace(stored, training=experiment.training)
    elif experiment is None:
        raise ValueError("a new run needs an experiment")
    else:
        run.require_free()
    beginning = run.kept_beginning() if resume else None
    accelerator = _accelerator(experiment.training, output)
    prepared = _prepared(experiment.data, cache, beginning, accelerator)
    if measured:
        experiment = _measured(experiment, prepared, beginning, accelerator)
    method = _method(experiment, prepared, beginning)
    origin = _origin(experiment, prepared)

    def export(weights: dict[str, Tensor], folder: Path) -> None:
        write_model(folder, method, weights, origin, trainer.standing)

    def settle() -> None:
        write_json(run.experiment, to_json(origin.experiment))

    settings = experiment.training
    with _alone_in(run, accelerator):
        trainer = Trainer(
            method,
            prepared.rows,
            prepared.validation,
            settings,
            run,
            export,
            accelerator,
            settle,
            describe(experiment, method.network),
        )
        if stored is not None and run.resumable():
            trainer.resume()
            _require_steps(settings, stored.training, trainer)
            if trainer.is_over:  # then no step is trained by other settings
                origin = replace(origin, experiment=stored)
        elif accelerator.is_main_process:
            settle()
            run.log.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
            _keep_beginning(run.beginning, method, prepared)
        ending = Ending(trainer.train(), accelerator.is_main_process, trainer.is_stopped)
    # Closes trackers and takes leave of the other processes, whose threads would else abort the interpreter's end.
    accelerator.end_training()
    return ending


@contextmanager
def _alone_in(run: RunFolder, accelerator: Accelerator) -> Iterator[None]:
    """Keeps others out of a run's folder, where two would overwrite each other's checkpoints."""
    if not accelerator.is_main_process:
        yield
        return
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run.path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process trains in {str(run.path)!r}; wait until it is over, or choose another --output"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _origin(experiment: Experiment, prepared: Prepared) -> Origin:
    rows, paired = prepared.rows, open_corpus(experiment.data, Split.TRAIN).paired
    return Origin(experiment, prepared.vocabulary, prepared.lexicon, rows.length_histogram, rows.fingerprint, paired)


def _prepared(data: Data, cache: Path, beginning: Path | None, accelerator: Accelerator) -> Prepared:
    """The rows of a run, which may have begun before; says how many there are."""
    with accelerator.main_process_first():  # the others then find everything in the cache
        prepared = prepare(data, cache) if beginning is None else _found(data, cache, beginning)
    if accelerator.is_main_process:
        for name, rows in (("training", prepared.rows), ("validation", prepared.validation)):
            print(f"{name} text: {rows.report.summary()}", file=sys.stderr)
    return prepared


def _keep_beginning(folder: Path, method: Method, prepared: Prepared) -> None:
    """Writes what the run must find again when it is resumed, whatever became of its text and of its start."""
    with written_folder(folder) as unfinished:
        prepared.vocabulary.save(unfinished)
        backbone_of(method).config.save_pretrained(unfinished)
        write_json(unfinished / "rows.json", prepared.fingerprints)


def _found(data: Data, cache: Path, beginning: Path) -> Prepared:
    """The rows of a run that goes on, with the vocabulary it began with; refuses a text that gives others."""
    vocabulary, began = Vocabulary.load(beginning), read_json(beginning / "rows.json")
    try:
        prepared = prepare(data, cache, vocabulary)
    except ValueError as error:
        raise ValueError(
            f"the run cannot read its text here ({error}); restore it, or resume where the run began"
        ) from None
    for split, found in prepared.fingerprints.items():
        if began.get(split) != found:
            corpus = data.validation if split == "validation" and data.validation else data.corpus
            raise ValueError(
                f"the {split} text {corpus!r} is not what it was when the run began; restore it, or train on the new "
                "one in another --output"
            )
    return prepared


def _accelerator(settings: Training, output: Path) -> Accelerator:
    """The devices and processes of this machine; refuses what they cannot do."""
    if settings.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("--precision fp16 needs a GPU, and there is none here; give bf16, or no")
    missing = set(settings.trackers) - {str(tracker) for tracker in get_available_trackers()}
    if missing:
        name = min(missing)
        raise ValueError(f"the tracker {name!r} is not installed; pip install {name}, or leave out --trackers")
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # said aloud, or several processes on CPUs would not find each other
        mixed_precision=settings.precision,
        log_with=list(settings.trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "trackers")),
    )


def _require_steps(settings: Training, before: Training, trainer: Trainer) -> None:
    """Refuses an end that the run has passed."""
    step = trainer.standing.step
    if settings.steps != before.steps and settings.steps <= step:
        raise ValueError(f"the run stands at step {step}, so it cannot end at --steps {settings.steps}; give more")
    if trainer.is_over and settings != before and trainer.accelerator.is_main_process:
        print(
            f"the run is over at step {step}: other settings change nothing, unless there are more --steps",
            file=sys.stderr,
        )


def _measured(
    experiment: Experiment, prepared: Prepared, beginning: Path | None, accelerator: Accelerator
) -> Experiment:
    """Measures this machine, says what it found, and takes the micro-batch that suits it."""
    settings = experiment.training
    places = int(np.mean(BatchPlan(prepared.rows.lengths, settings.batching, settings.seed).places()))
    share = max(1, places // accelerator.num_processes)
    found = measure(_method(experiment, prepared, beginning), prepared.rows, settings, accelerator.device, share)
    found = broadcast_object_list([found])[0]  # processes must split their batches alike
    settings, seconds = proposed(settings, found, places, accelerator.num_processes)
    if accelerator.is_main_process:
        print(
            f"this machine: {found.tokens_per_second:,.0f} tokens/s on {accelerator.device} at {found.micro_tokens:,} "
            f"at once, {accelerator.num_processes} process(es); {settings.steps:,} steps of {places:,} tokens will "
            f"take about {datetime.timedelta(seconds=round(seconds))}, validation not counted",
            file=sys.stderr,
        )
    return replace(experiment, training=settings)


def _method(experiment: Experiment, prepared: Prepared, beginning: Path | None) -> Method:
    """The method with the weights of its start, or, of a run that goes on, with any: a checkpoint has them all."""
    torch.manual_seed(experiment.training.seed)
    if beginning is not None:
        return build(experiment, prepared.lexicon, backbone=new_lm(beginning))
    if not isinstance(experiment.network, Pretrained):
        return build(experiment, prepared.lexicon)
    start = _start(experiment.network.name)
    experiment = replace(experiment, network=Pretrained(str(start)))
    method = build(experiment, replace(prepared.lexicon, exponents=learned_exponents(start)))
    restore_beside(method, start, experiment)
    return method


def _start(name: str) -> Path:
    """Where the files of a start are, brought here if need be; those of an original checkpoint are one file."""
    return Path(name) if name.endswith(".th") else located("language model", name, FILES)
