"""Runs `train` and `pretrain`: turns their options into a configuration and trains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from diffusionbert.cli.train import Pretrain, Run, Train
from diffusionbert.data.sources import Split
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.time_sampling import TimeSampling
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig
from diffusionbert.objectives.discrete_time import Quantity
from diffusionbert.recipes import SYSTEMS, pretraining, recipe
from diffusionbert.storage.files import read_json
from diffusionbert.storage.schema import from_json, from_text, to_json
from diffusionbert.training.batches import FixedSequences, TokenBudget
from diffusionbert.training.config import RunConfig
from diffusionbert.training.model_folder import push_model
from diffusionbert.training.run import TrainingRun, open_corpus, stored_config, train
from diffusionbert.training.run_folder import RunFolder

_SIZES = "layers", "width", "heads", "dropout"


def start(options: Run) -> None:
    """Trains and reports where the model is."""
    config = _resumed(options) if options.resume else configure(options)
    _require_pairs(options, config)
    run = train(config, options.output, cache=options.cache, resume=options.resume, auto=options.auto)
    if run.is_main_process:
        _report(options, run)
    if run.is_stopped:  # a script must not continue after an unfinished run
        raise KeyboardInterrupt


# ---- a new run ------------------------------------------------------------------------------------------------------


def configure(options: Run) -> RunConfig:
    """The configuration of a new run."""
    config = _changed_training(options, _base(options))
    data = _changed(options, config.data)
    config = replace(config, data=replace(data, lower=False) if options.cased else data)
    if any(getattr(options, name) is not None for name in _SIZES):
        if config.backbone.pretrained is not None:
            raise ValueError(
                "--layers, --width, --heads and --dropout are for new networks; leave them out, or start from scratch"
            )
        config = replace(config, backbone=_changed(options, config.backbone))
    return _changed_objective(options, config) if isinstance(options, Train) else config


def _base(options: Run) -> RunConfig:
    """The preset, system and start, or the configuration file, before other options change it."""
    name = options.preset or "tiny"
    if options.config is not None:
        named = {"preset": options.preset, "system": getattr(options, "system", None)}
        for option, value in {**named, "start": getattr(options, "start", None)}.items():
            if value is not None:
                raise ValueError(f"--config and --{option} exclude each other; give one of them")
        config = RunConfig.from_json(read_json(options.config), options.config.name)
        return config if options.data is None else replace(config, data=replace(config.data, corpus=options.data))
    if options.data is None:
        raise ValueError("--data is missing; give a text file, or pydoc for the documentation of Python")
    if isinstance(options, Pretrain):
        return pretraining(name, options.data, decoder=options.decoder)
    assert isinstance(options, Train)
    return recipe(options.data, name, system_name=options.system, start=options.start)


def _changed(options: Run, settings: Any) -> Any:
    """The settings with the fields replaced that the options set."""
    names = {field.name for field in fields(settings)}
    values = {name: getattr(options, name) for name in vars(options) if name in names}
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
    return replace(settings, **given)


def _changed_training(options: Run, config: RunConfig) -> RunConfig:
    """The configuration with the training settings replaced that the options set."""
    training = _changed(options, config.training)
    if options.compile and options.no_compile:
        raise ValueError("--compile and --no-compile exclude each other; give one of them")
    if options.no_compile:
        training = replace(training, compile=False)
    if options.batch_tokens is not None and options.batch_sequences is not None:
        raise ValueError("--batch-tokens and --batch-sequences exclude each other; give one of them")
    if options.batch_tokens is not None:
        training = replace(training, batching=TokenBudget(options.batch_tokens))
    if options.batch_sequences is not None:
        training = replace(training, batching=FixedSequences(options.batch_sequences))
    return replace(config, training=training)


def _changed_objective(options: Train, config: RunConfig) -> RunConfig:
    """The configuration with the objective and time embedding that the options set."""
    objective = config.objective
    if options.objective is not None:
        objective = _chosen_objective(options.objective, objective)
    values: dict[str, tuple[str, Any]] = {
        "schedule": ("schedule", _member(options.schedule, NoiseSchedule, "--schedule")),
        "time_sampling": ("time_sampling", _member(options.time_sampling, TimeSampling, "--time-sampling")),
        "diffusion_steps": ("num_steps", options.diffusion_steps),
        "quantity": ("quantity", None if options.quantity is None else Quantity(options.quantity)),
        "hybrid": ("hybrid", options.hybrid),
        "noise": ("uniform_noise", None if options.noise is None else options.noise == "uniform"),
    }
    given = {option: (field, value) for option, (field, value) in values.items() if value is not None}
    known = {field.name for field in fields(objective)}  # type: ignore[arg-type]
    for option, (field, _) in given.items():
        if field not in known:
            name = objective.registry.name_of(objective)
            raise ValueError(
                f"--{option.replace('_', '-')} {getattr(options, option)} is not for the objective {name}; leave it out"
            )
    objective = replace(objective, **dict(given.values()))  # type: ignore[type-var]
    time = config.time if options.time is None else TimeEmbedding(options.time)
    return replace(config, objective=objective, time=time)


def _chosen_objective(text: str, current: ObjectiveConfig) -> ObjectiveConfig:
    """The objective that a text names; if it is the current one, settings that the text leaves out are kept."""
    chosen: ObjectiveConfig = _member(text, ObjectiveConfig, "--objective")
    if type(chosen) is not type(current):
        return chosen
    named = {setting.partition("=")[0] for setting in text.partition(":")[2].split(",")}
    kept = {name: value for name, value in to_json(current).items() if name not in named}
    merged: ObjectiveConfig = from_json(to_json(chosen) | kept, ObjectiveConfig, "--objective")
    return merged


def _member(text: str | None, family: Any, flag: str) -> Any:
    return None if text is None else from_text(text, family, flag)


def _require_pairs(options: Run, config: RunConfig) -> None:
    """Raises ValueError if a system that is trained on pairs gets single sentences."""
    system = SYSTEMS.get(options.system or "") if isinstance(options, Train) else None
    if system and system.needs_pairs and not open_corpus(config.data, Split.TRAIN).paired:
        raise ValueError(f"{system.title} needs pairs, but {config.data.corpus!r} has none; give a .tsv file")


# ---- a resumed run --------------------------------------------------------------------------------------------------


def _resumed(options: Run) -> RunConfig:
    """The configuration of the run to resume, with the training settings replaced that the options set.

    The command may repeat the options that started the run: another option than one of training is rejected only if its
    value differs from the run's.
    """
    stored = stored_config(options.output)
    free = {field.name for field in fields(stored.training)} | {"batch_tokens", "batch_sequences", "no_compile"}
    free |= {"output", "auto", "resume", "push", "cache"}
    given = {field.name for field in fields(options) if getattr(options, field.name) != field.default} - free
    if given:
        requested = configure(_as_started(options, stored))
        different = next(_differences(given, requested, stored), None)
        if different is not None:
            name, mine, theirs = different
            raise ValueError(
                f"the run in {str(options.output)!r} has {name} {_shown(theirs)}, not {_shown(mine)}, which cannot "
                "change; give only training settings with --resume, or choose another --output"
            )
    return _changed_training(options, stored)


def _as_started(options: Run, stored: RunConfig) -> Run:
    """The options with the corpus of the run, unless they name one, and with the model that it started from.

    The start may be gone; a run directory as `start` then no longer resolves to its model.
    """
    if options.config is None:
        options = replace(options, data=options.data or stored.data.corpus)
    if isinstance(options, Train) and options.start and stored.backbone.pretrained is not None:
        exported = str(RunFolder(Path(options.start)).model)
        options = replace(options, start=exported if exported == stored.backbone.pretrained else options.start)
    return options


def _shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Enum):
        return str(value.value)
    return str(value) if hasattr(value, "registry") else repr(value)


def _differences(given: set[str], requested: RunConfig, stored: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, requested value and stored value of each given option that differs from the run."""
    named = given | {field for option, field in (("data", "corpus"), ("cased", "lower")) if option in given}
    if "start" in given:
        named |= {"name_or_path", "vocabulary"}
    if given & {"preset", "config"}:
        named |= {field.name for part in (requested.data, requested.backbone) for field in fields(part)}  # type: ignore[arg-type]
    if given - {field.name for field in fields(Run)} - {"start"} or given & {"preset", "config"}:
        named |= {"time", "objective"}
    parts: list[tuple[Any, Any]] = [(requested.data, stored.data)]
    if type(requested.backbone) is type(stored.backbone):
        parts.append((requested.backbone, stored.backbone))
    elif given & {"preset", "config", "start", "system", "decoder", *_SIZES}:
        named.add("backbone")
    parts += [(requested, stored)]
    if "objective" in named and type(requested.objective) is type(stored.objective):
        named = (named - {"objective"}) | {field.name for field in fields(requested.objective)}  # type: ignore[arg-type]
        parts.append((requested.objective, stored.objective))
    for mine, theirs in parts:
        for field in fields(mine):
            one, other = getattr(mine, field.name), getattr(theirs, field.name)
            if field.name in named - {"data"} and one != other:
                yield field.name, one, other


# ---- reports --------------------------------------------------------------------------------------------------------


def _report(options: Run, run: TrainingRun) -> None:
    """Prints where the model is, and pushes it if that was asked for and the run is complete."""
    state, model = run.state, RunFolder(options.output).model
    if state.is_validated:
        best = "none" if state.best is None else f"{state.best:.4f} per token at step {state.best_step}"
        print(f"{options.output}: step {state.step}, best validation {best}; model in {model}")
    else:
        print(f"{options.output}: step {state.step}, not validated yet; current parameters in {model}")
    if options.push and not run.is_stopped:
        print(f"pushed to {push_model(model, options.push)}")
