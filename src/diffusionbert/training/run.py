"""Runs a configuration: corpus → tokenizer → encoded sequences → network and objective → trainer → run directory."""

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
from transformers import PreTrainedModel

from diffusionbert.data.cleaning import Cleaning
from diffusionbert.data.corpus import Corpus, parse_corpus
from diffusionbert.data.dataset import Encoded, encode_corpus
from diffusionbert.data.sources import Split
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.config import Pretrained, Provided
from diffusionbert.networks.loading import new_lm, require_reopenable
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.reporting import reason_of
from diffusionbert.storage.cache import build_once
from diffusionbert.storage.files import atomic_folder, read_json, require_writable, write_json
from diffusionbert.training.batches import BatchPlan
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.description import describe
from diffusionbert.training.log import ValidationEvent, events_of
from diffusionbert.training.measure import measure, proposed
from diffusionbert.training.model_folder import (
    ModelMetadata,
    backbone_of,
    find_start,
    learned_exponents,
    restore_beside,
    token_statistics,
    write_model,
)
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.state import TrainState
from diffusionbert.training.trainer import Trainer

# ---- data -----------------------------------------------------------------------------------------------------------


def default_cache() -> Path:
    """Where encoded corpora are kept: DIFFUSIONBERT_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("DIFFUSIONBERT_CACHE") or Path(base) / "diffusionbert")


@dataclass(frozen=True, eq=False)
class PreparedData:
    """A corpus as a network reads it."""

    vocabulary: Vocabulary
    rows: Encoded
    validation: Encoded

    @property
    def statistics(self) -> TokenStatistics:
        """The token statistics of the training split."""
        return token_statistics(self.vocabulary, self.rows.counts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of all sequences of each split."""
        return {"training": self.rows.fingerprint, "validation": self.validation.fingerprint}


def open_corpus(data: DataConfig, split: Split) -> Corpus:
    """One split of a corpus."""
    fields = [field for field in (data.field, data.target_field) if field]
    cleaning = Cleaning(lower=data.lower, detokenise=data.detokenise)
    return parse_corpus(data.corpus, split, validation=data.validation, fields=fields, cleaning=cleaning)


def prepare(data: DataConfig, cache: Path, vocabulary: Vocabulary | None = None) -> PreparedData:
    """Reads, tokenises and encodes a corpus; what was encoded before is opened from the cache.

    A `vocabulary` that is given is used in place of the configured one.
    """
    vocabulary = vocabulary or _vocabulary(data, cache)
    rows, validation = (
        encode_corpus(open_corpus(data, split), vocabulary, cache, max_length=data.max_length)
        for split in (Split.TRAIN, Split.VALIDATION)
    )
    return PreparedData(vocabulary, rows, validation)


def _vocabulary(data: DataConfig, cache: Path) -> Vocabulary:
    if isinstance(data.vocabulary, str):
        return Vocabulary.load(data.vocabulary)
    corpus = open_corpus(data, Split.TRAIN)
    key = hashlib.sha256(f"wordpiece {corpus.fingerprint} {data.vocabulary} {data.lower}".encode()).hexdigest()
    trained = partial(train_wordpiece, corpus, data.vocabulary, lower=data.lower)
    return Vocabulary.load(build_once(cache / f"vocabulary-{key[:32]}", lambda folder: trained().save(folder)))


# ---- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """A run directory after training, as one of its processes knows it."""

    path: Path
    state: TrainState
    is_stopped: bool
    """Whether a signal stopped it before its last step."""
    is_main_process: bool = True

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return stored_config(self.path)

    @property
    def history(self) -> tuple[ValidationEvent, ...]:
        """All validations, from the log."""
        return tuple(events_of(RunFolder(self.path).log, ValidationEvent))


def stored_config(run: Path) -> RunConfig:
    """The configuration of a run directory."""
    file = RunFolder(run).config
    try:
        return RunConfig.from_json(read_json(file), file.name)
    except (TypeError, ValueError) as error:
        if not file.exists():
            raise
        raise ValueError(
            f"{str(file)!r} does not describe a run ({reason_of(error)}); restore it, or choose another --output"
        ) from None


def train(
    config: RunConfig | None,
    output: str | Path,
    *,
    cache: Path | None = None,
    resume: bool = False,
    auto: bool = False,
    backbone: PreTrainedModel | None = None,
) -> TrainingRun:
    """Trains a configuration, or resumes the run in a directory.

    Args:
        config: What to train; with `resume`, None or the run's own with other settings of training.
        output: The run directory: configuration, log, checkpoints and, in the end, the model.
        cache: Where encoded corpora are kept; None is the user's cache folder.
        resume: Continue the run in `output` from its last checkpoint.
        auto: Measure this machine first and choose the micro-batch that fits.
        backbone: A masked (or, for a causal objective, causal) language model that is used in place of the configured
            backbone. Its class must be one that transformers' Auto classes open.

    Returns:
        The run, with its validations as `history`.

    Example:
        >>> from diffusionbert.recipes import recipe
        >>> run = train(recipe("pydoc", "tiny"), "runs/tiny")  # doctest: +SKIP
        >>> [validation.nats_per_token for validation in run.history]  # doctest: +SKIP
    """
    output, cache = Path(output), cache or default_cache()
    run = RunFolder(output)
    require_writable(output)
    stored = stored_config(output) if resume else None
    if stored is not None:
        config = stored if config is None else replace(stored, training=config.training)
    elif config is None:
        raise ValueError("a new run needs a configuration; give one, or resume=True")
    else:
        run.require_free()
        if backbone is not None:
            require_reopenable(backbone)
            config = replace(config, backbone=Provided(type(backbone).__name__))
    config.to_json()  # refuses, before any work, what could not be opened again
    beginning = run.kept_beginning() if resume else None
    accelerator = _accelerator(config.training, output)
    prepared = _prepared(config.data, cache, beginning, accelerator)
    if auto:
        config = _measured(config, prepared, beginning, accelerator, backbone)
    module = _module(config, prepared, beginning, backbone)
    metadata = _metadata(config, prepared)

    def export(weights: dict[str, Tensor], folder: Path) -> None:
        write_model(folder, module, weights, metadata, trainer.state)

    def settle() -> None:
        write_json(run.config, metadata.config.to_json())

    settings = config.training
    with _alone_in(run, accelerator):
        trainer = Trainer(
            module,
            prepared.rows,
            prepared.validation,
            settings,
            run,
            export,
            accelerator,
            settle,
            describe(config, module.network),
        )
        if stored is not None and run.resumable():
            trainer.resume()
            _require_steps(settings, stored.training, trainer)
            if trainer.is_over:  # then no step is trained by other settings
                metadata = replace(metadata, config=stored)
        elif accelerator.is_main_process:
            settle()
            run.log.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
            _keep_beginning(run.beginning, module, prepared)
        state = trainer.train()
    # Closes trackers and synchronises processes, whose threads would otherwise abort the interpreter's shutdown.
    accelerator.end_training()
    return TrainingRun(output, state, trainer.is_stopped, accelerator.is_main_process)


@contextmanager
def _alone_in(run: RunFolder, accelerator: Accelerator) -> Iterator[None]:
    """Locks a run directory, in which two processes would overwrite each other's checkpoints."""
    if not accelerator.is_main_process:
        yield
        return
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run.path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process trains in {str(run.path)!r}; wait until it ends, or choose another --output"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _metadata(config: RunConfig, prepared: PreparedData) -> ModelMetadata:
    rows, paired = prepared.rows, open_corpus(config.data, Split.TRAIN).paired
    return ModelMetadata(
        config, prepared.vocabulary, prepared.statistics, rows.length_histogram, rows.fingerprint, paired
    )


def _prepared(data: DataConfig, cache: Path, beginning: Path | None, accelerator: Accelerator) -> PreparedData:
    """The data of a run, which may have begun before; reports how much there is."""
    with accelerator.main_process_first():  # the others then find everything in the cache
        prepared = prepare(data, cache) if beginning is None else _resumed_data(data, cache, beginning)
    if accelerator.is_main_process:
        for name, rows in (("training", prepared.rows), ("validation", prepared.validation)):
            print(f"{name} text: {rows.report.summary()}", file=sys.stderr)
    return prepared


def _keep_beginning(folder: Path, module: TrainingModule, prepared: PreparedData) -> None:
    """Writes what resuming needs, whatever becomes of the training text and of the start."""
    with atomic_folder(folder) as unfinished:
        prepared.vocabulary.save(unfinished)
        backbone_of(module).config.save_pretrained(unfinished)
        write_json(unfinished / "rows.json", prepared.fingerprints)


def _resumed_data(data: DataConfig, cache: Path, beginning: Path) -> PreparedData:
    """The data of a resumed run, with the vocabulary it began with; refuses another text."""
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


def _accelerator(settings: TrainingConfig, output: Path) -> Accelerator:
    """The devices and processes of this machine; refuses what they cannot do."""
    if settings.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("--precision fp16 needs a GPU, and there is none here; give bf16, or no")
    missing = set(settings.trackers) - {str(tracker) for tracker in get_available_trackers()}
    if missing:
        name = min(missing)
        raise ValueError(f"the tracker {name!r} is not installed; pip install {name}, or leave out --trackers")
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # explicit, or several processes on CPUs would not find each other
        mixed_precision=settings.precision,
        log_with=list(settings.trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "trackers")),
    )


def _require_steps(settings: TrainingConfig, before: TrainingConfig, trainer: Trainer) -> None:
    """Refuses an end that the run has passed."""
    step = trainer.state.step
    if settings.steps != before.steps and settings.steps <= step:
        raise ValueError(f"the run is at step {step}, so it cannot end at --steps {settings.steps}; give more")
    if trainer.is_over and settings != before and trainer.accelerator.is_main_process:
        print(f"the run ended at step {step}: other settings have no effect without more --steps", file=sys.stderr)


def _measured(
    config: RunConfig,
    prepared: PreparedData,
    beginning: Path | None,
    accelerator: Accelerator,
    backbone: PreTrainedModel | None,
) -> RunConfig:
    """Measures this machine, reports its speed, and takes the micro-batch that suits it."""
    settings = config.training
    tokens = int(np.mean(BatchPlan(prepared.rows.lengths, settings.batching, settings.seed).positions()))
    share = max(1, tokens // accelerator.num_processes)
    module = _module(config, prepared, beginning, backbone)
    found = measure(module, prepared.rows, settings, accelerator.device, share)
    found = broadcast_object_list([found])[0]  # processes must split their batches alike
    settings, seconds = proposed(settings, found, tokens, accelerator.num_processes)
    if accelerator.is_main_process:
        print(
            f"this machine: {found.tokens_per_second:,.0f} tokens/s on {accelerator.device} at {found.micro_tokens:,} "
            f"at once, {accelerator.num_processes} process(es); {settings.steps:,} steps of {tokens:,} tokens will "
            f"take about {datetime.timedelta(seconds=round(seconds))}, validation not counted",
            file=sys.stderr,
        )
    return replace(config, training=settings)


def _module(
    config: RunConfig, prepared: PreparedData, beginning: Path | None, backbone: PreTrainedModel | None
) -> TrainingModule:
    """Network and objective with the parameters of the start; for a resumed run any, which a checkpoint replaces."""
    torch.manual_seed(config.training.seed)
    if beginning is not None:
        return config.make_module(prepared.statistics, new_lm(beginning))
    if config.backbone.pretrained is None:
        return config.make_module(prepared.statistics, backbone)
    start = find_start(config.backbone.pretrained)
    config = replace(config, backbone=Pretrained(str(start)))
    module = config.make_module(replace(prepared.statistics, exponents=learned_exponents(start)))
    restore_beside(module.network, start, config)
    return module
