"""Trains a configuration: corpus → tokenizer → encoded sequences → network and objective → trainer → run directory."""

from __future__ import annotations

import datetime
import hashlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel

from diffusionbert.data.corpus import Cleaning, Corpus, parse_corpus
from diffusionbert.data.dataset import Encoded, encode_corpus, source_lengths
from diffusionbert.data.sources import Files, Split
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.loading import Pretrained, Provided, new_lm, require_legacy_checkpoint, require_reopenable
from diffusionbert.networks.lora import add_lora, merged
from diffusionbert.networks.remote import has_float64
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.parallel import current
from diffusionbert.reporting import logger, reason_of
from diffusionbert.storage.files import (
    atomic_folder,
    build_once,
    read_json,
    require_output,
    require_writable,
    write_json,
)
from diffusionbert.storage.schema import from_json
from diffusionbert.training.batches import BatchPlan
from diffusionbert.training.checkpoint import TrainState, stored_weights
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.log import ValidationEvent, describe, events_of
from diffusionbert.training.model_folder import (
    ModelMetadata,
    backbone_of,
    find_start,
    how_trained,
    learned_exponents,
    restore_beside,
    started_letter_case,
    token_statistics,
    tokens_before,
    training_source,
    write_model,
)
from diffusionbert.training.optim import measure
from diffusionbert.training.run_folder import FINGERPRINTS, RunFolder
from diffusionbert.training.step import compile_cache, packs
from diffusionbert.training.trainer import Trainer


def default_cache() -> Path:
    """Where encoded corpora are kept: DIFFUSIONBERT_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("DIFFUSIONBERT_CACHE") or Path(base) / "diffusionbert")


@dataclass(frozen=True, eq=False)
class PreparedData:
    """The encoded training and validation splits of a corpus, and their tokenizer."""

    vocabulary: Vocabulary
    sequences: Encoded
    validation: Encoded

    @property
    def statistics(self) -> TokenStatistics:
        """The token statistics of the training split."""
        return token_statistics(self.vocabulary, self.sequences.counts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of all sequences of each split."""
        return {"training": self.sequences.fingerprint, "validation": self.validation.fingerprint}


def open_corpus(data: DataConfig, split: Split) -> Corpus:
    """One split of a corpus."""
    cleaning = Cleaning(lower=data.lower, detokenize=data.detokenize)
    return parse_corpus(
        data.corpus, split, validation=data.validation, held_out=data.held_out, fields=data.fields, cleaning=cleaning
    )


def with_held_out(data: DataConfig) -> DataConfig:
    """Fills in the fraction that a new run holds out, if it is not given."""
    if data.held_out is not None or data.validation is not None:
        return data
    source = training_source(data)
    return replace(data, held_out=source.fraction_to_hold_out()) if isinstance(source, Files) else data


def prepare(data: DataConfig, cache: Path, vocabulary: Vocabulary | None = None) -> PreparedData:
    """Reads, tokenizes and encodes a corpus, or opens it from the cache; the processes of a launch share the work.

    Args:
        data: The corpus.
        cache: Where encoded corpora are kept.
        vocabulary: Used instead of the configured one.
    """
    vocabulary = vocabulary or _vocabulary(data, cache)
    sequences, validation = (
        encode_corpus(open_corpus(data, split), vocabulary, cache, max_length=data.max_length)
        for split in (Split.TRAIN, Split.VALIDATION)
    )
    return PreparedData(vocabulary, sequences, validation)


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
    """A run directory after training."""

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
    compiled: Path | None = None,
    prepared: PreparedData | None = None,
) -> TrainingRun:
    """Trains a configuration, or resumes the run in a directory.

    Args:
        config: What to train; with `resume`, None, or the run's own with other training settings.
        output: The run directory: configuration, log, checkpoints and, in the end, the model.
        cache: Where encoded corpora are kept; None is the user's cache folder.
        resume: Continue the run in `output` from its last checkpoint.
        auto: Measure this machine first and choose the micro-batch that fits.
        backbone: A masked (or, for a causal objective, causal) language model to use instead of the configured
            backbone. Its class must be one that transformers' Auto classes open.
        compiled: A file that keeps compiled kernels for the next run or another machine.
        prepared: The text of a new run, if it has already been prepared and reported.

    Returns:
        The run, with its validations as `history`.

    Examples:
        >>> from diffusionbert.recipes import recipe
        >>> run = train(recipe("pydoc", "tiny"), "runs/tiny")  # doctest: +SKIP
        >>> [validation.nats_per_token for validation in run.history]  # doctest: +SKIP
    """
    require_output(output)
    output, cache = Path(output), cache or default_cache()
    run = RunFolder(output)
    require_writable(output)
    stored = stored_config(output) if resume else None
    if stored is not None:
        config = stored if config is None else replace(stored, training=config.training)
        old, new = stored.training.optimizer, config.training.optimizer
        if new != old:
            raise ValueError(
                f"the run in {str(output)!r} is trained with the optimizer {old}, whose state {new} cannot use; give "
                f"`optimizer` {old}, or train in another --output"
            )
    elif config is None:
        raise ValueError("a new run needs a configuration; give one, or resume=True")
    else:
        run.require_free()
        if backbone is not None:
            require_reopenable(backbone)
            config = replace(config, backbone=Provided(type(backbone).__name__))
    config.to_json()  # refuses what could not be opened again, before any work is done
    if stored is None and (config.backbone.pretrained or "").endswith(".th"):
        require_legacy_checkpoint(Path(str(config.backbone.pretrained)))  # before its tokenizer is looked up
    if stored is None:
        config = replace(config, data=with_held_out(config.data))
    start = run.resumable_start() if resume else None
    accelerator = make_accelerator(config.training, output)
    if prepared is None:
        prepared = prepare(config.data, cache) if start is None else _resumed_data(config.data, cache, run)
        for name, sequences in (("training", prepared.sequences), ("validation", prepared.validation)):
            if accelerator.is_main_process:
                logger.info(f"{name} text: {sequences.report.summary()}")
    if accelerator.is_main_process and stored is None:
        _warn_of_other_tokenizers(output, config.data, prepared.vocabulary)
        _warn_of_sentences_read_before(config, prepared.sequences)
    if auto:
        config = replace(config, training=_measured(config, prepared, start, accelerator, backbone))
    module = _module(config, prepared, start, backbone)
    form = config.training.weight_format  # even for the model of a run that is over
    sequences, paired = prepared.sequences, open_corpus(config.data, Split.TRAIN).paired
    vocabulary = replace(prepared.vocabulary, letter_case=_letter_case(config, sequences))
    metadata = ModelMetadata(
        config,
        vocabulary,
        prepared.statistics,
        sequences.length_histogram,
        sequences.fingerprint,
        paired,
        pretraining_tokens=_pretraining_tokens(config, start, backbone),
        source_lengths=source_lengths(sequences) if paired else None,
    )

    def export(weights: dict[str, Tensor], folder: Path) -> None:
        write_model(folder, module, merged(weights), metadata, trainer.state, form)

    kernels = compiled if config.training.compile else None
    with _lock(run, accelerator), compile_cache(kernels, is_written=accelerator.is_main_process):
        about = describe(config, module.network)
        trainer = Trainer(module, sequences, prepared.validation, config.training, run, export, accelerator, about)
        is_resumed = stored is not None and bool(run.resume_candidates())
        if stored is not None and is_resumed:
            trainer.resume()
            steps, step = config.training.steps, trainer.state.step
            if steps != stored.training.steps and steps <= step:
                raise ValueError(f"`steps` must be more than {step}, which the run has reached, got {steps}")
            if trainer.is_over:  # no step will be trained with the new settings
                metadata = replace(metadata, config=stored)
        if accelerator.is_main_process:
            write_json(run.config, metadata.config.to_json())
            if not is_resumed:
                run.log.unlink(missing_ok=True)  # from a run that was killed before its first checkpoint
                _write_start(run.start, module, prepared, metadata.pretraining_tokens)
        state = trainer.train()
    if current().number == 1:
        # Closes trackers and synchronizes processes, whose threads would otherwise abort the interpreter's shutdown.
        accelerator.end_training()
    else:  # the processes carry on together
        for tracker in accelerator.trackers:
            tracker.finish()
    return TrainingRun(output, state, trainer.is_stopped, accelerator.is_main_process)


def _warn_of_other_tokenizers(output: Path, data: DataConfig, vocabulary: Vocabulary) -> None:
    """Warns if a run next to this one has another tokenizer for the same text: such runs are meant to be compared."""
    beside = output.absolute().parent
    for folder in _inside(beside):
        run = RunFolder(folder)
        try:
            if folder.name == output.name or not run.config.is_file() or not run.start.is_dir():
                continue
            other = stored_config(folder).data
            is_other = other.corpus == data.corpus and Vocabulary.load(run.start).fingerprint != vocabulary.fingerprint
        except (OSError, TypeError, ValueError):  # it is damaged or not ours, which is no concern of this run
            continue
        if is_other:
            start = output.parent / folder.name / run.start.name
            logger.warning(
                f"this run's tokenizer differs from that of {folder.name!r}, on the same text: compare them by bits "
                f"per byte, not by nats per token, or share it (--vocabulary {start})"
            )
            return


def _inside(folder: Path) -> list[Path]:
    """What a folder contains; nothing if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _warn_of_sentences_read_before(config: RunConfig, sequences: Encoded) -> None:
    """Warns if a run would read first what the model it starts from has read, and leave the rest of the text unread."""
    start, training = config.backbone.pretrained, config.training
    known = None if start is None else how_trained(start)
    if known is None:
        return
    before, seen = known[0].training, known[1].tokens_seen
    is_same = known[1].data_fingerprint == sequences.fingerprint and before.batching == training.batching
    num_tokens = int((sequences.length_histogram * torch.arange(len(sequences.length_histogram))).sum())
    if is_same and before.seed == training.seed and seen is not None and seen < num_tokens:
        logger.warning(
            f"the model that this run starts from has read {seen / num_tokens:.0%} of this text, and with the same "
            f"seed this run begins with the same sentences; give another --seed than {training.seed}"
        )


def _pretraining_tokens(config: RunConfig, start: Path | None, backbone: PreTrainedModel | None) -> int | None:
    """The tokens that the network had seen before; stored with the run, as what it started from may be gone."""
    if start is None:
        return None if backbone is not None else tokens_before(config.backbone.pretrained)
    file = start / _PRETRAINING
    return from_json(read_json(file), dict[str, int | None], str(file)).get("tokens") if file.exists() else None


def _letter_case(config: RunConfig, sequences: Encoded) -> Tensor | None:
    """The usual letter case of words, from the text and, if the vocabulary is the same, from the starting model."""
    start = config.backbone.pretrained
    if start is None or start != config.data.vocabulary:
        return sequences.letter_case
    return started_letter_case(sequences.letter_case, sequences.counts, Path(start))


def _lock(run: RunFolder, accelerator: Accelerator) -> AbstractContextManager[object]:
    """Locks a run directory, since two runs would overwrite each other's checkpoints."""
    if not accelerator.is_main_process:
        return nullcontext()
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(run.path / ".lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process is training in {str(run.path)!r}; wait until it ends, or choose another --output"
        ) from None
    except IsADirectoryError:
        raise ValueError(f"{str(run.path / '.lock')!r} is a folder; remove it, or choose another --output") from None


_PRETRAINING = "pretraining.json"


def _write_start(folder: Path, module: TrainingModule, prepared: PreparedData, tokens: int | None) -> None:
    """Writes what resuming needs even if the training text or the starting model is gone."""
    with atomic_folder(folder) as unfinished:
        prepared.vocabulary.save(unfinished)
        backbone_of(module).config.save_pretrained(unfinished)
        write_json(unfinished / FINGERPRINTS, prepared.fingerprints)
        write_json(unfinished / _PRETRAINING, {"tokens": tokens})


def _resumed_data(data: DataConfig, cache: Path, run: RunFolder) -> PreparedData:
    """The data of a resumed run, with its own vocabulary; refuses text that has changed."""
    expected = from_json(read_json(run.fingerprints), dict[str, str], str(run.fingerprints))
    try:
        prepared = prepare(data, cache, Vocabulary.load(run.start))
    except ValueError as error:
        raise ValueError(
            f"the text of the run cannot be read here ({error}); restore it, or resume where it was started"
        ) from None
    for split, fingerprint in prepared.fingerprints.items():
        if expected.get(split) != fingerprint:
            corpus = data.validation if split == "validation" and data.validation else data.corpus
            raise ValueError(
                f"the {split} text {corpus!r} has changed since the run was started; restore it, or train on the new "
                "text in another --output"
            )
    return prepared


def make_accelerator(settings: TrainingConfig, output: Path | None, *, cpu: bool = False) -> Accelerator:
    """The devices and processes of this machine; refuses settings that they do not support.

    Args:
        settings: The training settings, for precision and trackers.
        output: The run directory, for trackers.
        cpu: Use the CPU even if there is a GPU.
    """
    if settings.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("mixed precision fp16 needs a GPU, and none was found; use bf16 or no")
    missing = set(settings.trackers) - {str(tracker) for tracker in get_available_trackers()}
    if missing:
        name = min(missing)
        raise ValueError(f"the tracker {name!r} is not installed; pip install {name}, or leave out --trackers")
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()  # or a second run in one process could not change the precision
    folders = ProjectConfiguration()
    if output is not None:
        folders = ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "trackers"))
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None and not has_float64(found):
        logger.info(f"{found.type} has no float64, which training needs; training on the CPU")
    return Accelerator(
        # Explicit, or several processes on CPUs would not find each other.
        cpu=cpu or found is None or not has_float64(found),
        mixed_precision=settings.precision,
        log_with=list(settings.trackers) or None,
        project_config=folders,
    )


def _measured(
    config: RunConfig,
    prepared: PreparedData,
    start: Path | None,
    accelerator: Accelerator,
    backbone: PreTrainedModel | None,
) -> TrainingConfig:
    """The settings with the micro-batch that is fastest on this machine; reports its speed."""
    settings, num_processes = config.training, accelerator.num_processes
    module = _module(config, prepared, start, backbone)
    packed = packs(module, settings)
    plan = BatchPlan(prepared.sequences.lengths, settings.batching, settings.seed, packed=packed)
    tokens = int(np.mean(plan.positions()))
    share = max(1, tokens // num_processes)
    found = measure(module, prepared.sequences, settings, accelerator.device, share, packed=packed)
    found = broadcast_object_list([found])[0]  # processes must split their batches in the same way
    if accelerator.is_main_process:
        seconds = settings.steps * tokens / (found.tokens_per_second * num_processes)
        logger.info(
            f"{accelerator.device}: {found.tokens_per_second:,.0f} tokens/s in micro-batches of {found.micro_tokens:,} "
            f"tokens on {num_processes} process(es); {settings.steps:,} steps of {tokens:,} tokens will take about "
            f"{datetime.timedelta(seconds=round(seconds))}, validation not counted"
        )
    return replace(settings, micro_tokens=None if found.micro_tokens == share else found.micro_tokens)


def _module(
    config: RunConfig, prepared: PreparedData, start: Path | None, backbone: PreTrainedModel | None
) -> TrainingModule:
    """Network and objective with initial parameters, which are arbitrary if a checkpoint will be restored."""
    module = _new_module(config, prepared, start, backbone)
    if config.training.lora is not None:
        add_lora(backbone_of(module), config.training.lora)
    return module


def _new_module(
    config: RunConfig, prepared: PreparedData, start: Path | None, backbone: PreTrainedModel | None
) -> TrainingModule:
    torch.manual_seed(config.training.seed)
    if start is not None:
        return config.make_module(prepared.statistics, new_lm(start, stored_weights(RunFolder(start.parent))))
    if config.backbone.pretrained is None:
        return config.make_module(prepared.statistics, backbone)
    pretrained = find_start(config.backbone.pretrained)
    config = replace(config, backbone=Pretrained(str(pretrained)))
    module = config.make_module(replace(prepared.statistics, exponents=learned_exponents(pretrained)))
    restore_beside(module.network, pretrained, config)
    return module
