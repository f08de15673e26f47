"""What `train` and `pretrain` do: words become an experiment, and the experiment a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
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
    Objectives,
    Pretrained,
    Time,
    VectorDiffusion,
)
from diffusionbert.methods.discrete import Quantity
from diffusionbert.model_folder import push_model
from diffusionbert.paper.systems import SYSTEMS, Start
from diffusionbert.presets import by_name, pretraining
from diffusionbert.proposals import Bell
from diffusionbert.runs import Ending, default_cache, open_corpus, started_from, stored_experiment, train
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
    elif any(getattr(options, name) is not None for name in ("layers", "width", "heads", "dropout")):
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
    objective: Objectives = experiment.objective
    if options.method is not None and not isinstance(objective, Diffusion):
        raise ValueError(f"--method {options.method} is not for the system {options.system}; leave it out")
    if options.method == "continuous" and isinstance(objective, Diffusion):
        objective = ContinuousDiffusion(objective.schedule, objective.proposal)
    elif options.method == "any-order":
        objective = AnyOrderWriting()
    _require_company(options, objective)
    return replace(experiment, objective=_with_settings(options, objective))


def _with_settings(options: Train, objective: Objectives) -> Objectives:
    """The objective with those settings replaced that the command line names; what it has not is refused."""
    bell, quantity, noise = options.bell, options.quantity, options.noise
    given: dict[str, tuple[str, Any]] = {
        "schedule": ("schedule", _schedule(options)),
        "bell": ("proposal", None if bell is None else Bell(bell, weighted=not options.bell_unweighted)),
        "diffusion_steps": ("num_steps", options.diffusion_steps),
        "quantity": ("quantity", None if quantity is None else Quantity(quantity)),
        "hybrid": ("hybrid", options.hybrid),
        "noise": ("uniform_noise", None if noise is None else noise == "uniform"),
    }
    names = {field.name for field in fields(objective)}
    takes: dict[str, Any] = {"floor": options.floor} if "floor" in names and options.floor is not None else {}
    for option, (name, value) in given.items():
        if value is None:
            continue
        if name not in names:
            whose = f"--method {options.method}" if options.method else f"the system {options.system}"
            flag = option.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(options, option)} is not for {whose}; leave it out")
        takes[name] = value
    return replace(objective, **takes)


def _require_company(options: Train, objective: Objectives) -> None:
    """Refuses what says more of an option that is not there."""
    is_spindle = options.schedule in ("spindle", "spindle-sentence")
    if options.strength is not None and not is_spindle:
        raise ValueError(f"--strength {options.strength} is the spindle's; add --schedule spindle, or leave it out")
    if options.floor is not None and not is_spindle and not isinstance(objective, VectorDiffusion):
        raise ValueError(f"--floor {options.floor} is the spindle's; add --schedule spindle, or leave it out")
    if options.bell_unweighted and options.bell is None:
        raise ValueError("--bell-unweighted is of a bell; add --bell 0.8, or leave it out")


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


def _schedule(options: Train) -> NoiseSchedule | None:
    strength = 0.3 if options.strength is None else options.strength
    match options.schedule:
        case "linear":
            return Linear()
        case "cosine":
            return Cosine()
        case "sqrt":
            return Sqrt()
        case "spindle":
            return Spindle(strength, Mean.CORPUS, options.floor or 0.0)
        case "spindle-sentence":
            floor = 0.05 if options.floor is None and options.quantity != "paper" else options.floor or 0.0
            return Spindle(strength, Mean.SENTENCE, floor)
        case _:
            return None


def _with_training(options: Run, experiment: Experiment) -> Experiment:
    """The experiment with those settings of training replaced that the command line names."""
    training = _given(options, experiment.training)
    if options.batch_tokens is not None and options.batch_rows is not None:
        raise ValueError("--batch-tokens and --batch-rows exclude each other; give one of them")
    batching: Batching = training.batching
    if options.batch_tokens is not None:
        batching = TokenBudget(options.batch_tokens)
    if options.batch_rows is not None:
        batching = FixedRows(options.batch_rows)
    return replace(experiment, training=replace(training, batching=batching))


def _resumed(options: Run) -> Experiment:
    """The experiment of the run, with those settings of training replaced that the command line names.

    A line may be the one that began the run: what is not of training is refused only if the run has it otherwise.
    """
    stored = stored_experiment(options.output)
    anew = {field.name for field in fields(stored.training)} | {"batch_tokens", "batch_rows"}
    anew |= {"output", "auto", "resume", "push", "cache"}
    given = {field.name for field in fields(options) if getattr(options, field.name) != field.default} - anew
    if given:
        asked = _experiment(_as_begun(options, stored))
        different = next(_differences(given, asked, stored), None)
        if different is not None:
            name, mine, theirs = different
            raise ValueError(
                f"the run in {str(options.output)!r} has {name} {_told(theirs)}, not {_told(mine)}, and that stays; "
                "give --resume settings of training alone, or choose another --output"
            )
    return _with_training(options, stored)


def _as_begun(options: Run, stored: Experiment) -> Run:
    """The options with the text of the run, unless they name one, and with the very model from which it started.

    That may be gone, and a run folder then no longer says that its model was meant.
    """
    options = replace(options, data=options.data or stored.data.corpus)
    if isinstance(options, Train) and options.start and isinstance(stored.network, Pretrained):
        left = str(RunFolder(Path(options.start)).model)
        options = replace(options, start=left if left == stored.network.name else options.start)
    return options


def _told(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else repr(value)


def _differences(given: set[str], asked: Experiment, stored: Experiment) -> Iterator[tuple[str, Any, Any]]:
    """What of a run is not as these options ask for: name, asked, stored. What nobody asked for is not looked at."""
    named = given | {field for option, field in (("data", "corpus"), ("cased", "lower")) if option in given}
    if "start" in given:
        named |= {"name", "vocabulary"}
    if "preset" in given:
        named |= {field.name for field in (*fields(asked.data), *fields(asked.network))}
    if given - {field.name for field in fields(Run)} - {"start"} or "preset" in given:
        named |= {"time", "objective"}
    parts: list[tuple[Any, Any]] = [(asked.data, stored.data)]
    if type(asked.network) is type(stored.network):
        parts.append((asked.network, stored.network))
    elif given & {"preset", "start", "system", "decoder", "layers", "width", "heads", "dropout"}:
        named.add("network")
    parts += [(asked, stored)]
    if "objective" in named and type(asked.objective) is type(stored.objective):
        named = (named - {"objective"}) | {field.name for field in fields(asked.objective)}
        parts.append((asked.objective, stored.objective))
    for mine, theirs in parts:
        for field in fields(mine):
            one, other = getattr(mine, field.name), getattr(theirs, field.name)
            if field.name in named - {"data"} and one != other:
                yield field.name, one, other


def start(options: Run) -> None:
    """Trains by what the command line says, and says where the model is."""
    experiment = _resumed(options) if options.resume else _experiment(options)
    _require_pairs(options, experiment)
    ending = train(experiment, options.output, options.cache or default_cache(), options.resume, options.auto)
    if ending.speaks:
        _report(options, ending)
    if ending.is_stopped:  # whatever follows a training in a script must not go on with half of it
        raise KeyboardInterrupt


def _report(options: Run, ending: Ending) -> None:
    """Says where the model is; pushes it if asked to, and if it is trained to its end."""
    standing, model = ending.standing, RunFolder(options.output).model
    if standing.is_validated:
        best = "none" if standing.best is None else f"{standing.best:.4f} a token at step {standing.best_step}"
        print(f"{options.output}: step {standing.step}, best validation {best}; model in {model}")
    else:
        print(f"{options.output}: step {standing.step}, not validated yet; its weights as they are in {model}")
    if options.push and not ending.is_stopped:
        print(f"pushed to {push_model(model, options.push)}")
