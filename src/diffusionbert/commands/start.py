"""What `train` and `pretrain` do: words become an experiment, and the experiment a run."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from diffusionbert.batches import Batching, FixedRows, TokenBudget
from diffusionbert.checkpoints import RunFolder
from diffusionbert.commands.training import Pretrain, Run, Train
from diffusionbert.experiments import (
    AnyOrderWriting,
    ContinuousDiffusion,
    Data,
    Diffusion,
    Experiment,
    NewBert,
    NewDecoder,
    Time,
    VectorDiffusion,
)
from diffusionbert.methods.discrete import Quantity
from diffusionbert.model_folder import push_model
from diffusionbert.paper.systems import SYSTEMS, Start
from diffusionbert.presets import by_name, pretraining
from diffusionbert.proposals import Bell
from diffusionbert.runs import default_cache, open_corpus, started_from, stored_experiment, train
from diffusionbert.schedules import Cosine, Linear, Mean, NoiseSchedule, Spindle, Sqrt
from diffusionbert.text.sources import Split


def _given(options: Run, settings: Any) -> Any:
    """Settings with those replaced that the command line names."""
    names = {field.name for field in fields(settings)}
    values = {name: getattr(options, name) for name in vars(options) if name in names}
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
    return replace(settings, **given)


def _experiment(options: Run) -> Experiment:
    if options.data is None:
        raise ValueError("there is no --data; give a text file, or pydoc for the English that ships with Python")
    if isinstance(options, Pretrain):
        experiment = pretraining(options.preset, options.data, decoder=options.decoder)
    else:
        experiment = by_name(options.preset, options.data)
    if isinstance(options, Train) and options.start:
        experiment = started_from(experiment, options.start)
    data: Data = _given(options, experiment.data)
    if options.cased:
        data = replace(data, lower=False)
    experiment = _with_training(options, replace(experiment, data=data))
    if isinstance(experiment.network, NewBert | NewDecoder):
        experiment = replace(experiment, network=_given(options, experiment.network))
    elif options.layers or options.width or options.heads or options.dropout is not None:
        raise ValueError(
            "a trained network has its own layers, width, heads and dropout; leave them away, or start from scratch"
        )
    return _diffusion(options, experiment) if isinstance(options, Train) else experiment


def _diffusion(options: Train, experiment: Experiment) -> Experiment:
    """Adds what only `train` can say."""
    if options.system is not None:
        experiment = _system(options.system, options.start, experiment)
    if options.time:
        experiment = replace(experiment, time=Time(options.time))
    preset = experiment.objective
    if not isinstance(preset, Diffusion):
        return _other(options, experiment)
    schedule = _schedule(options) or preset.schedule
    proposal = preset.proposal if options.bell is None else Bell(options.bell, weighted=not options.bell_unweighted)
    match options.method:
        case "continuous":
            return replace(experiment, objective=ContinuousDiffusion(schedule, proposal))
        case "any-order":
            return replace(experiment, objective=AnyOrderWriting())
    objective = replace(preset, schedule=schedule, proposal=proposal)
    if options.diffusion_steps is not None:
        objective = replace(objective, num_steps=options.diffusion_steps)
    if options.quantity is not None:
        objective = replace(objective, quantity=Quantity(options.quantity))
    if options.hybrid is not None:
        objective = replace(objective, hybrid=options.hybrid)
    if options.noise is not None:
        objective = replace(objective, uniform_noise=options.noise == "uniform")
    return replace(experiment, objective=objective)


def _system(name: str, start: str | None, experiment: Experiment) -> Experiment:
    if name not in SYSTEMS:
        raise ValueError(f"there is no system {name!r}; use one of {', '.join(SYSTEMS)}")
    if start is not None and SYSTEMS[name].start is Start.SCRATCH:
        raise ValueError(f"{name} starts from random weights; leave out --start {start}, or take only its --vocabulary")
    return SYSTEMS[name].experiment(experiment)


def _require_pairs(options: Run, experiment: Experiment) -> None:
    """Refuses single sentences for a system that answers a source."""
    system = SYSTEMS.get(options.system or "") if isinstance(options, Train) else None
    if system and system.needs_pairs and not open_corpus(experiment.data, Split.TRAIN).paired:
        raise ValueError(
            f"{system.title} learns from pairs, which {experiment.data.corpus!r} has not; give a .tsv file"
        )


def _other(options: Train, experiment: Experiment) -> Experiment:
    """A method that is no diffusion over a grid of tokens: few of the options are for it."""
    objective, schedule = experiment.objective, _schedule(options)
    takes: dict[str, Any] = {}
    if isinstance(objective, ContinuousDiffusion | VectorDiffusion) and schedule is not None:
        takes["schedule"] = schedule
    if isinstance(objective, ContinuousDiffusion) and options.bell is not None:
        takes["proposal"] = Bell(options.bell, weighted=not options.bell_unweighted)
    if isinstance(objective, VectorDiffusion) and options.diffusion_steps is not None:
        takes["num_steps"] = options.diffusion_steps
    if isinstance(objective, VectorDiffusion) and options.floor is not None:
        takes["floor"] = options.floor
    names = {"schedule": "schedule", "bell": "proposal", "diffusion_steps": "num_steps"}
    for option in ("method", "schedule", "bell", "diffusion_steps", "quantity", "hybrid", "noise"):
        if getattr(options, option) is not None and names.get(option) not in takes:
            flag = option.replace("_", "-")
            raise ValueError(
                f"--{flag} {getattr(options, option)} is not for the system {options.system}; leave it out"
            )
    return replace(experiment, objective=replace(objective, **takes))


def _schedule(options: Train) -> NoiseSchedule | None:
    match options.schedule:
        case "linear":
            return Linear()
        case "cosine":
            return Cosine()
        case "sqrt":
            return Sqrt()
        case "spindle":
            return Spindle(options.strength, Mean.CORPUS, options.floor or 0.0)
        case "spindle-sentence":
            floor = 0.05 if options.floor is None and options.quantity != "paper" else options.floor or 0.0
            return Spindle(options.strength, Mean.SENTENCE, floor)
        case _:
            return None


def _with_training(options: Run, experiment: Experiment) -> Experiment:
    """The experiment with those settings of training replaced that the command line names."""
    training = _given(options, experiment.training)
    if options.batch_tokens and options.batch_rows:
        raise ValueError("--batch-tokens and --batch-rows exclude each other; give one of them")
    batching: Batching = training.batching
    if options.batch_tokens:
        batching = TokenBudget(options.batch_tokens)
    if options.batch_rows:
        batching = FixedRows(options.batch_rows)
    return replace(experiment, training=replace(training, batching=batching))


def start(options: Run) -> None:
    """Trains by what the command line says, and says where the model is."""
    experiment = _with_training(options, stored_experiment(options.output)) if options.resume else _experiment(options)
    _require_pairs(options, experiment)
    standing = train(experiment, options.output, options.cache or default_cache(), options.resume, options.auto)
    best = "none" if standing.best is None else f"{standing.best:.4f} a token at step {standing.best_step}"
    model = RunFolder(options.output).model
    print(f"{options.output}: step {standing.step}, best validation {best}; model in {model}")
    if options.push:
        print(f"pushed to {push_model(model, options.push)}")
