"""`train`, and what it shares with `pretrain`: turns options into a run configuration, and trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes

from diffusionbert.cli.common import Flag, OptionalFloat, OptionalInt, OptionalPath, OptionalText, option

if TYPE_CHECKING:
    from diffusionbert.objectives.base import ObjectiveConfig
    from diffusionbert.training.config import RunConfig


@dataclass(frozen=True)
class DataOptions:
    """How the corpus is read; the preset sets the defaults."""

    validation: OptionalText = None
    """A validation corpus. Default: a fraction of the data is held out."""
    held_out: OptionalFloat = None
    """The fraction of the lines held out from files for validation.
    Default: 0.01; with fewer than 20,000 lines, 200 lines, but no more than a tenth."""
    field: OptionalText = None
    """The field of JSON lines that holds the text, or the source of a pair."""
    target_field: OptionalText = None
    """The field of JSON lines that holds the target of a pair."""
    vocabulary: Annotated[int | str | None, option("INT|STR")] = None
    """The size of a WordPiece vocabulary to train on the data, or the folder or Hub name of a tokenizer."""
    max_length: OptionalInt = None
    """The maximum number of tokens per sequence; longer ones are skipped and counted."""
    cased: Flag = False
    """Keep upper case instead of lower-casing the text."""
    detokenize: Flag = False
    """Undo the tokenization of text such as LM1B's: "it 's" becomes "it's"."""


@dataclass(frozen=True)
class NetworkOptions:
    """The family and size of a new network; the preset sets the defaults."""

    backbone: Annotated[Literal["bert", "modern"] | None, option("{bert,modern}")] = None
    """The family of a new network: bert (GPT-2 for decoders), or modern (ModernBERT's layers for both).
    ModernBERT's layers have pre-norm, rotary positions and gated MLPs."""
    layers: OptionalInt = None
    """The number of layers of a new network."""
    width: OptionalInt = None
    """The hidden size of a new network."""
    heads: OptionalInt = None
    """The number of attention heads of a new network."""
    dropout: OptionalFloat = None
    """The dropout of a new network."""


@dataclass(frozen=True)
class TrainingOptions:
    """How the network is trained; the preset sets the defaults."""

    steps: OptionalInt = None
    """The number of training steps."""
    batch_tokens: OptionalInt = None
    """The number of tokens per global batch, including padding."""
    batch_sequences: OptionalInt = None
    """The number of sequences per global batch, instead of --batch-tokens."""
    micro_tokens: OptionalInt = None
    """The maximum number of tokens on one device at once; gradients of larger batches are accumulated."""
    optimizer: Annotated[Literal["adamw", "muon"] | None, option("{adamw,muon}")] = None
    """The optimizer: AdamW, or Muon for the layers' matrices and AdamW for everything else."""
    learning_rate: OptionalFloat = None
    """The peak learning rate.
    Default: the preset's; with --start, at most 1e-4 if the start is a diffusion model or the preset is tiny."""
    warmup: OptionalInt = None
    """The number of warm-up steps."""
    decay: Annotated[
        Literal["linear", "cosine", "inverse_sqrt", "constant_with_warmup", "wsd"] | None,
        option("{linear,cosine,inverse_sqrt,constant_with_warmup,wsd}"),
    ] = None
    """The learning rate schedule after the warm-up; wsd stays at the peak and decays at the end."""
    decay_fraction: OptionalFloat = None
    """With --decay wsd, the fraction of steps in which the learning rate decays. Default: 0.2."""
    weight_decay: OptionalFloat = None
    """The weight decay of matrices."""
    weight_decay_end: OptionalFloat = None
    """The weight decay at the last step, reached linearly. Default: the same as at the first."""
    ema: OptionalFloat = None
    """Validate and export an exponential moving average of the parameters with this decay, such as 0.9999."""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"] | None, option("{no,bf16,fp16}")] = None
    """The precision of matrix products."""
    compile: Flag = False
    """Compile the network with torch.compile, as the wiki presets and the paper preset do."""
    no_compile: Flag = False
    """Do not compile the network, even if the preset does."""
    no_cuda_graphs: Flag = False
    """Do not capture training steps as CUDA graphs, even for small batches on one GPU."""
    packing: Flag = False
    """Pack several sequences into each row, without padding, as the preset bundled does.
    Helps with short sentences in large batches on a GPU; for time-agnostic BERTs and ModernBERTs."""
    no_packing: Flag = False
    """Do not pack sequences, even if the preset does."""
    sharded: Flag = False
    """With several processes, shard the network (FSDP) instead of copying it (DDP)."""
    patience: OptionalInt = None
    """Stop after this many validations without improvement."""
    seed: OptionalInt = None
    """The seed of initialization, batches and noise."""


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded, and how often; the preset sets the defaults."""

    validate_every: OptionalInt = None
    """The number of steps between validations."""
    save_every: OptionalInt = None
    """The number of steps between checkpoints."""
    log_every: OptionalInt = None
    """The number of steps between log entries."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], option("[{tensorboard,wandb,trackio} ...]")
    ] = ()
    """Experiment trackers to log to, besides log.jsonl."""
    export_precision: Annotated[Literal["fp32", "fp16", "bf16", "int8"] | None, option("{fp32,fp16,bf16,int8}")] = None
    """The precision of the weights in the model folder; only diffusionbert opens int8. Default: fp32."""
    shard_size: OptionalText = None
    """The maximum size of a weight file in the model folder, such as 15MB. Default: all weights in one file."""
    push: OptionalText = None
    """Push the trained model to the Hub under this name; a new repository is private."""
    cache: OptionalPath = None
    """The directory for encoded corpora. Default: the user's cache directory."""
    compile_cache: OptionalPath = None
    """With --compile, a file that keeps compiled kernels for the next run or another machine of the same kind.
    It contains code: use only a file that you made yourself."""


@dataclass(frozen=True)
class Run(ABC):
    """The options of both `train` and `pretrain`. The preset sets the defaults."""

    output: Path
    """The run directory, for configuration, log, checkpoints and finally the model."""
    data: OptionalText = None
    """The training corpus: a text file (or .gz, .xz, .zst), a folder or glob, .jsonl with --field, .tsv pairs, …
    Or pydoc (Python's documentation), lm1b:FOLDER or hf:NAME.
    Required unless given by --config or --resume."""
    preset: Annotated[
        Literal["tiny", "small", "paper", "wiki-small", "wiki-medium", "bundled"] | None,
        option("{tiny,small,paper,wiki-small,wiki-medium,bundled}"),
    ] = None
    """The size and length of the run; other options override it.
    tiny: two cores, about a minute.
    small, wiki-small, wiki-medium: one GPU, minutes.
    bundled: a stage of the bundled model.
    paper: BERT-base, 1.9M steps.
    Default: tiny."""
    config: OptionalPath = None
    """The configuration of a run (run.json) instead of a preset; other options override it.
    With --start, it is the next stage of that run."""
    auto: Flag = False
    """Measure this machine first: choose the micro-batch size that fits and estimate the duration of the run."""
    resume: Flag = False
    """Continue the run in the output directory from its last checkpoint.
    Training settings may change; data, network and objective may not, and can be omitted."""
    text: OmitArgPrefixes[DataOptions] = DataOptions()
    network: OmitArgPrefixes[NetworkOptions] = NetworkOptions()
    training: OmitArgPrefixes[TrainingOptions] = TrainingOptions()
    records: OmitArgPrefixes[RecordOptions] = RecordOptions()

    @abstractmethod
    def base(self, data: str) -> RunConfig:
        """The configuration for a corpus, before other options change it."""

    def run(self) -> None:
        """Trains, prints where the model is, and pushes it if the run is complete."""
        from diffusionbert.recipes import require_pairs
        from diffusionbert.training.model_folder import push_model
        from diffusionbert.training.run import train

        config = _resumed(self) if self.resume else configure(self)
        require_pairs(getattr(self, "system", None), config)
        run = train(
            config,
            self.output,
            cache=self.records.cache,
            resume=self.resume,
            auto=self.auto,
            compiled=self.records.compile_cache,
        )
        state, model = run.state, self.output / "model"
        if run.is_main_process:
            best = f"not validated yet; current parameters in {model}"
            if state.is_validated:
                figure = "none" if state.best is None else f"{state.best:.4f} per token at step {state.best_step}"
                best = f"best validation {figure}; model in {model}"
            print(f"{self.output}: step {state.step}, {best}")
            if getattr(self, "start", None) and state.step and state.is_validated and state.best_step == 0:
                print("no gain on held-out text; try `diffusionbert adapt`, which chooses the settings for you")
            if self.records.push and not run.is_stopped:
                print(f"pushed to {push_model(model, self.records.push)}")
        if run.is_stopped:  # a script must not continue after an unfinished run
            raise KeyboardInterrupt


@dataclass(frozen=True)
class DiffusionOptions:
    """The objective and its noise; the system sets the defaults."""

    objective: OptionalText = None
    """An objective, optionally with settings: discrete-time, continuous-time, order-agnostic, gaussian:floor=0.01, …"""
    schedule: OptionalText = None
    """A noise schedule by name: linear, cosine, sqrt, spindle, spindle:strength=0.3,mean=sentence,floor=0.05, …"""
    time_sampling: OptionalText = None
    """The distribution of training times: uniform, early, bell, bell:depth=0.8,weighted=false, …
    With weighted=false the loss is not a bound, but the model gets better."""
    diffusion_steps: OptionalInt = None
    """T, the number of steps of the time grid."""
    quantity: Annotated[Literal["strict", "paper"] | None, option("{strict,paper}")] = None
    """The quantity to optimize: strict is a bound on the likelihood.
    paper, He et al.'s for the spindle, is not."""
    hybrid: OptionalFloat = None
    """The weight of D3PM's auxiliary cross-entropy."""
    noise: Annotated[Literal["absorbing", "uniform"] | None, option("{absorbing,uniform}")] = None
    """The forward process: tokens become [MASK] (absorbing) or random tokens (uniform)."""
    time: Annotated[
        Literal["none", "prefix", "layers", "layers-random", "layers-learned"] | None,
        option("{none,prefix,layers,layers-random,layers-learned}"),
    ] = None
    """The time conditioning of the network: none (TAD), prefix (PTE) or layers (LTE, initialized at zero).
    Variants: layers-random (initialized at random, as in the paper), layers-learned (a vector per timestep)."""


@dataclass(frozen=True)
class Train(Run):
    """Train a diffusion model: from scratch, from a masked language model, or from another run.

    Example: diffusionbert train --preset tiny --data pydoc --output runs/tiny
    """

    start: OptionalText = None
    """The network to start from: the folder or Hub name of a masked language model (for a decoder, of a causal one).
    Or a run directory, a .th file of the original release, or bundled.
    Default: random parameters."""
    system: OptionalText = None
    """A system of the paper, or one of its peers, which sets the objective, start and time embedding.
    diffusionbert, d3pm, mdlm, genmd4, oa-ardm, multinomial, diffusion-lm, diffuseq, bert-mouth, cmlm, sundae, …
    All are listed in docs/methods.md.
    Default: the preset's objective."""
    diffusion: OmitArgPrefixes[DiffusionOptions] = DiffusionOptions()

    def base(self, data: str) -> RunConfig:
        """The preset, system and start."""
        from diffusionbert.recipes import recipe

        return recipe(data, self.preset or "tiny", system_name=self.system, start=self.start)


# ---- configurations -------------------------------------------------------------------------------------------------


def configure(options: Run) -> RunConfig:
    """The configuration of a new run."""
    from diffusionbert.recipes import started_from
    from diffusionbert.storage.files import read_json
    from diffusionbert.training.config import RunConfig

    if options.config is None:
        if options.data is None:
            raise ValueError("--data is missing; give a text file, or pydoc for Python's documentation")
        return _changed(options, options.base(options.data))
    for name in ("preset", "system"):
        if getattr(options, name, None) is not None:
            raise ValueError(f"--config and --{name} exclude each other; give one of them")
    config, start = RunConfig.from_json(read_json(options.config), options.config.name), getattr(options, "start", None)
    return _changed(options, config if start is None else started_from(config, start))


def _changed(options: Run, config: RunConfig) -> RunConfig:
    """The configuration with the given options applied."""
    from diffusionbert.networks.loading import of_family

    data = _replaced(options.text, config.data)
    if options.data not in (None, data.corpus) and options.text.held_out is None:
        data = replace(data, held_out=None)  # the fraction was that of the other text
    data = replace(data, corpus=options.data or data.corpus, lower=data.lower and not options.text.cased)
    config = replace(_with_training(options, config), data=data)
    if options.network != NetworkOptions():
        if config.backbone.pretrained is not None:
            raise ValueError(
                "--backbone, --layers, --width, --heads and --dropout are for new networks; leave them out, or start "
                "from scratch"
            )
        backbone = _replaced(options.network, config.backbone)
        if options.network.backbone is not None:
            backbone = of_family(backbone, options.network.backbone)
        config = replace(config, backbone=backbone)
    return _with_objective(options, config) if isinstance(options, Train) else config


def _replaced(options: Any, settings: Any) -> Any:
    """The settings, with the fields given as options replaced."""
    values = {field.name: getattr(options, field.name, None) for field in fields(settings)}
    return replace(
        settings,
        **{name: value for name, value in values.items() if not (value is None or value is False or value == ())},
    )


def _with_training(given: Run, config: RunConfig) -> RunConfig:
    from diffusionbert.training.batches import FixedSequences, TokenBudget

    training, options = _replaced(given.records, _replaced(given.training, config.training)), given.training
    if options.mixed_precision is not None:
        training = replace(training, precision=options.mixed_precision)
    if options.decay_fraction is not None and training.decay != "wsd":
        raise ValueError(f"--decay-fraction is for --decay wsd, got --decay {training.decay}; leave it out")
    if options.compile and options.no_compile:
        raise ValueError("--compile and --no-compile exclude each other; give one of them")
    if options.no_compile:
        training = replace(training, compile=False)
    if options.packing and options.no_packing:
        raise ValueError("--packing and --no-packing exclude each other; give one of them")
    if options.no_packing:
        training = replace(training, packing=False)
    if options.no_cuda_graphs:
        training = replace(training, cuda_graphs=False)
    if options.batch_tokens is not None and options.batch_sequences is not None:
        raise ValueError("--batch-tokens and --batch-sequences exclude each other; give one of them")
    if options.batch_tokens is not None:
        training = replace(training, batching=TokenBudget(options.batch_tokens))
    if options.batch_sequences is not None:
        training = replace(training, batching=FixedSequences(options.batch_sequences))
    return replace(config, training=training)


def _with_objective(options: Train, config: RunConfig) -> RunConfig:
    from diffusionbert.diffusion.schedules import NoiseSchedule
    from diffusionbert.diffusion.time_sampling import TimeSampling
    from diffusionbert.networks.time_conditioning import TimeEmbedding
    from diffusionbert.objectives.discrete_time import Quantity
    from diffusionbert.storage.schema import from_text

    objective: Any = config.objective
    member: Any = from_text  # mypy refuses abstract families
    if options.diffusion.objective is not None:
        objective = _chosen_objective(options.diffusion.objective, objective)
    settings: dict[str, tuple[str, Any]] = {
        "schedule": ("schedule", lambda text: member(text, NoiseSchedule, "--schedule")),
        "time_sampling": ("time_sampling", lambda text: member(text, TimeSampling, "--time-sampling")),
        "diffusion_steps": ("num_steps", int),
        "quantity": ("quantity", Quantity),
        "hybrid": ("hybrid", float),
        "noise": ("uniform_noise", lambda noise: noise == "uniform"),
    }
    for option_name, (field, parse) in settings.items():
        if (given := getattr(options.diffusion, option_name)) is None:
            continue
        value = parse(given)
        if field not in {known.name for known in fields(objective)}:
            name, flag = objective.registry.name_of(objective), option_name.replace("_", "-")
            raise ValueError(f"--{flag} {given} is not for the objective {name}; leave it out")
        objective = replace(objective, **{field: value})
    time = config.time if options.diffusion.time is None else TimeEmbedding(options.diffusion.time)
    return replace(config, objective=objective, time=time)


def _chosen_objective(text: str, current: ObjectiveConfig) -> ObjectiveConfig:
    """The objective named by a text; if it is the current one, settings that the text omits are kept."""
    from diffusionbert.objectives.base import ObjectiveConfig
    from diffusionbert.storage.schema import from_json, from_text, to_json

    chosen: ObjectiveConfig = from_text(text, ObjectiveConfig, "--objective")  # type: ignore[type-abstract]
    if type(chosen) is not type(current):
        return chosen
    named = {setting.partition("=")[0] for setting in text.partition(":")[2].split(",")}
    kept = {name: value for name, value in to_json(current).items() if name not in named}
    merged: ObjectiveConfig = from_json(to_json(chosen) | kept, ObjectiveConfig, "--objective")
    return merged


def _resumed(options: Run) -> RunConfig:
    """The configuration of the run to resume, with the training settings given as options replaced.

    The command may repeat the options that started the run; different data, network or objective are refused.
    """
    from diffusionbert.training.run import stored_config

    stored = stored_config(options.output)
    options = replace(options, text=replace(options.text, held_out=options.text.held_out or stored.data.held_out))
    start, pretrained = getattr(options, "start", None), stored.backbone.pretrained
    if start and pretrained == str(Path(start) / "model"):  # it may be gone, and is then not a run directory
        options = replace(options, start=pretrained)  # type: ignore[call-arg]
    if options.config is not None:
        requested = configure(options)
    elif options.preset or start or any(vars(options).get(name) for name in ("system", "decoder")):
        requested = _changed(options, options.base(options.data or stored.data.corpus))
    else:
        requested = _changed(options, stored)
    for part in ("data", "backbone", "time", "objective"):
        name, mine, theirs = part, getattr(requested, part), getattr(stored, part)
        if mine == theirs:
            continue
        if type(mine) is type(theirs) and is_dataclass(mine):
            pairs = ((field.name, getattr(mine, field.name), getattr(theirs, field.name)) for field in fields(mine))
            name, mine, theirs = next((name, one, other) for name, one, other in pairs if one != other)
        mine, theirs = (value.value if isinstance(value, Enum) else value for value in (mine, theirs))
        raise ValueError(
            f"the run in {str(options.output)!r} has {name} {theirs}, not {mine}, which cannot change; with --resume "
            "give only training settings, or all options that started the run"
        )
    return _with_training(options, stored)
