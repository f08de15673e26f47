"""The command line: turns words into settings, calls `runs`, and says errors in one line.

Exit code 0 on success, 2 on wrong use, 1 on failure. Names in strings end here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import subcommand

from diffusionbert.batches import Batching, FixedRows, TokenBudget
from diffusionbert.checkpoints import RunFolder
from diffusionbert.experiments import (
    AnyOrderWriting,
    ContinuousDiffusion,
    Data,
    Diffusion,
    Experiment,
    NewBert,
    Time,
)
from diffusionbert.methods.discrete import Quantity
from diffusionbert.model_folder import push_model
from diffusionbert.presets import PRESETS, masked
from diffusionbert.proposals import Bell, Even
from diffusionbert.runs import default_cache, started_from, stored_experiment, train
from diffusionbert.schedules import Cosine, Linear, Mean, NoiseSchedule, Spindle


@dataclass(frozen=True)
class _Run:
    """Options that `train` and `pretrain` share. What is left out, the preset decides."""

    output: Path
    """The run folder: log, checkpoints, and in the end the model."""
    data: str | None = None
    """A text file (.gz, .xz, .zst), a folder or glob; .jsonl with --field; .tsv pairs; pydoc; lm1b:FOLDER; hf:NAME."""
    preset: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: two cores, about a minute. small: one GPU, minutes. paper: BERT-base, 1.9M steps."""
    auto: bool = False
    """Measure this machine first: choose the micro-batch that fits, and say how long the run will take."""
    resume: bool = False
    """Go on with the run in the output folder, exactly where its last checkpoint was. Settings of training may be
    given anew; data, network and method stay what they were."""
    validation: str | None = None
    """A corpus to validate on; else a share of the data is held out."""
    field: str | None = None
    """The field of JSON lines that holds the text (or the source of a pair)."""
    target_field: str | None = None
    """The field that holds the target of a pair."""
    vocabulary: int | str | None = None
    """The size of a WordPiece to be trained on the data, or a tokenizer's folder or name."""
    max_length: int | None = None
    """Sentences of more tokens are left out, and counted."""
    cased: bool = False
    """Keep upper case; else everything is put in lower case."""
    detokenise: bool = False
    """Undo tokenised text such as LM1B's: "it 's" becomes "it's"."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    dropout: float | None = None
    steps: int | None = None
    """Training steps."""
    batch_tokens: int | None = None
    """Tokens of a global batch, padding counted."""
    batch_rows: int | None = None
    """Or: sentences of a global batch."""
    micro_tokens: int | None = None
    """At most so many at once on one device; the rest is accumulated."""
    learning_rate: float | None = None
    warmup: int | None = None
    decay: Literal["linear", "cosine", "inverse_sqrt", "constant_with_warmup"] | None = None
    averaging: float | None = None
    """Keep averaged weights with this decay, such as 0.9999, and validate and export them."""
    precision: Literal["no", "bf16", "fp16"] | None = None
    compile: bool = False
    sharded: bool = False
    """Over several processes, shard the network (FSDP) instead of copying it (DDP)."""
    patience: int | None = None
    """End after so many validations without a better one."""
    validate_every: int | None = None
    save_every: int | None = None
    log_every: int | None = None
    seed: int | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    push: str | None = None
    """In the end, push the model to the Hub under this name; a new repository is private."""
    cache: Path | None = None
    """Where encoded corpora are kept."""


@dataclass(frozen=True)
class Pretrain(_Run):
    """Pretrain a masked language model by ordinary masking.

    Example: diffusionbert pretrain --data corpus.txt.gz --output runs/masked
    """


@dataclass(frozen=True)
class Train(_Run):
    """Train a diffusion model: from scratch, from a masked language model, or from another run.

    Example: diffusionbert train --preset tiny --data pydoc --output runs/tiny
    """

    start: str | None = None
    """A masked language model's folder or Hub name, a run folder, or an original .th file; else from scratch."""
    method: Literal["diffusion", "continuous", "any-order"] | None = None
    schedule: Literal["linear", "cosine", "spindle", "spindle-sentence"] | None = None
    strength: float = 0.3
    """λ of the spindle."""
    floor: float | None = None
    """Share of linear mixed into the spindle; 0.05 with the sentence mean, else 0."""
    diffusion_steps: int | None = None
    """T, the number of steps of the bound."""
    quantity: Literal["strict", "paper"] | None = None
    """strict is a bound; paper is what the published spindle figures rest on, and is not."""
    hybrid: float | None = None
    """Weight of D3PM's auxiliary cross-entropy."""
    noise: Literal["absorbing", "uniform"] | None = None
    time: Literal["none", "prefix", "layers", "layers-learned"] | None = None
    """How the network is told the time: TAD, PTE, LTE."""
    bell: float | None = None
    """Draw times from a bell of this depth (0.8), not evenly."""


def _given(options: _Run, settings: Any) -> Any:
    """Settings with those replaced that the command line names."""
    names = {field.name for field in fields(settings)}
    values = {name: getattr(options, name) for name in vars(options) if name in names}
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
    return replace(settings, **given)


def _experiment(options: _Run) -> Experiment:
    if options.data is None:
        raise ValueError("there is no --data; give a text file, or pydoc for the English that ships with Python")
    experiment = PRESETS[options.preset](options.data)
    if isinstance(options, Pretrain):
        experiment = masked(experiment)
    if isinstance(options, Train) and options.start:
        experiment = started_from(experiment, options.start)
    data: Data = _given(options, experiment.data)
    if options.cased:
        data = replace(data, lower=False)
    experiment = _with_training(options, replace(experiment, data=data))
    if isinstance(experiment.network, NewBert):
        experiment = replace(experiment, network=_given(options, experiment.network))
    elif options.layers or options.width or options.heads or options.dropout is not None:
        raise ValueError(
            "a trained network has its own layers, width, heads and dropout; leave them away, or start from scratch"
        )
    return _diffusion(options, experiment) if isinstance(options, Train) else experiment


def _diffusion(options: Train, experiment: Experiment) -> Experiment:
    """Adds what only `train` can say."""
    if options.time:
        experiment = replace(experiment, time=Time(options.time))
    preset = experiment.objective
    assert isinstance(preset, Diffusion)
    schedule = _schedule(options) or preset.schedule
    proposal = Even() if options.bell is None else Bell(options.bell)
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
    return replace(experiment, objective=replace(objective, uniform_noise=options.noise == "uniform"))


def _schedule(options: Train) -> NoiseSchedule | None:
    match options.schedule:
        case "linear":
            return Linear()
        case "cosine":
            return Cosine()
        case "spindle":
            return Spindle(options.strength, Mean.CORPUS, options.floor or 0.0)
        case "spindle-sentence":
            floor = 0.05 if options.floor is None and options.quantity != "paper" else options.floor or 0.0
            return Spindle(options.strength, Mean.SENTENCE, floor)
        case _:
            return None


def _with_training(options: _Run, experiment: Experiment) -> Experiment:
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


def _run(options: _Run) -> None:
    experiment = _with_training(options, stored_experiment(options.output)) if options.resume else _experiment(options)
    standing = train(experiment, options.output, options.cache or default_cache(), options.resume, options.auto)
    best = f"{standing.best:.4f} nats a token at step {standing.best_step}" if standing.best is not None else "none"
    model = RunFolder(options.output).model
    print(f"{options.output}: step {standing.step}, best validation {best}; model in {model}")
    if options.push:
        print(f"pushed to {push_model(model, options.push)}")


Command = Annotated[Train, subcommand(name="train")] | Annotated[Pretrain, subcommand(name="pretrain")]


def main(arguments: list[str] | None = None) -> None:
    """Runs a command."""
    try:
        options: Any = tyro.cli(Command, prog="diffusionbert", args=arguments)
        _run(options)
    except BrokenPipeError:  # whoever read our output has read enough
        sys.exit(0)
    except ValueError as error:
        sys.exit(_say(error, code=2))
    except (OSError, RuntimeError, FloatingPointError) as error:
        sys.exit(_say(error, code=1))


def _say(error: Exception, code: int) -> int:
    print(f"diffusionbert: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
