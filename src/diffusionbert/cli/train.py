"""The options of `train` and `pretrain`; `start` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from diffusionbert.cli.common import OptionalFloat, OptionalInt, OptionalPath, OptionalText, option


@dataclass(frozen=True)
class Run:
    """Options that `train` and `pretrain` share. What is left out is the preset's."""

    output: Path
    """The run directory: configuration, log, checkpoints and, in the end, the model."""
    data: OptionalText = None
    """The training corpus: a text file (also .gz, .xz, .zst), a folder or glob, .jsonl with --field, .tsv pairs, pydoc
    (the documentation of Python), lm1b:FOLDER or hf:NAME. Required unless --config or --resume names it."""
    preset: Annotated[
        Literal["tiny", "small", "paper", "wiki-small", "wiki-medium"] | None,
        option("{tiny,small,paper,wiki-small,wiki-medium}"),
    ] = None
    """Size and length of the run; options below override it. tiny: two cores, about a minute. small, wiki-small (the
    bundled model), wiki-medium: one GPU, minutes. paper: BERT-base, 1.9M steps. Default: tiny."""
    config: OptionalPath = None
    """The configuration of a run (run.json) in place of a preset; other options override it."""
    auto: bool = False
    """Measure this machine first: choose the micro-batch that fits and estimate the duration of the run."""
    resume: bool = False
    """Continue the run in the output directory from its last checkpoint. Settings of training may change; data, network
    and objective may not, and can be left out."""
    validation: OptionalText = None
    """A validation corpus. Default: a share of the data is held out."""
    field: OptionalText = None
    """The field of JSON lines that holds the text, or the source of a pair."""
    target_field: OptionalText = None
    """The field of JSON lines that holds the target of a pair."""
    vocabulary: Annotated[int | str | None, option("INT|STR")] = None
    """The size of a WordPiece vocabulary to train on the data, or the folder or Hub name of a tokenizer. Default: the
    preset's."""
    max_length: OptionalInt = None
    """The maximum number of tokens of a sequence; longer ones are skipped and counted. Default: the preset's."""
    cased: bool = False
    """Keep upper case instead of lower-casing the text."""
    detokenise: bool = False
    """Undo the tokenisation of text such as LM1B's: "it 's" becomes "it's"."""
    layers: OptionalInt = None
    """The number of layers of a new network. Default: the preset's."""
    width: OptionalInt = None
    """The hidden size of a new network. Default: the preset's."""
    heads: OptionalInt = None
    """The number of attention heads of a new network. Default: the preset's."""
    dropout: OptionalFloat = None
    """The dropout of a new network. Default: the preset's."""
    steps: OptionalInt = None
    """The number of training steps. Default: the preset's."""
    batch_tokens: OptionalInt = None
    """The number of tokens per global batch, padding included. Default: the preset's."""
    batch_sequences: OptionalInt = None
    """The number of sequences per global batch, in place of --batch-tokens."""
    micro_tokens: OptionalInt = None
    """The maximum number of tokens on one device at once; larger batches are accumulated. Default: the preset's."""
    learning_rate: OptionalFloat = None
    """The peak learning rate. Default: the preset's; with --start at most 1e-4 if the start is a diffusion model or the
    preset is tiny."""
    warmup: OptionalInt = None
    """The number of warm-up steps. Default: the preset's."""
    decay: Annotated[
        Literal["linear", "cosine", "inverse_sqrt", "constant_with_warmup"] | None,
        option("{linear,cosine,inverse_sqrt,constant_with_warmup}"),
    ] = None
    """The schedule of the learning rate after the warm-up. Default: the preset's."""
    ema: OptionalFloat = None
    """Validate and export an exponential moving average of the parameters with this decay, such as 0.9999. Default: the
    preset's."""
    precision: Annotated[Literal["no", "bf16", "fp16"] | None, option("{no,bf16,fp16}")] = None
    """Mixed precision. Default: the preset's."""
    compile: bool = False
    """Compile the network with torch.compile, as the wiki presets do."""
    no_compile: bool = False
    """Do not compile the network, even if the preset does."""
    sharded: bool = False
    """With several processes, shard the network (FSDP) instead of copying it (DDP)."""
    patience: OptionalInt = None
    """Stop after this many validations without improvement. Default: the preset's."""
    validate_every: OptionalInt = None
    """The number of steps between validations. Default: the preset's."""
    save_every: OptionalInt = None
    """The number of steps between checkpoints. Default: the preset's."""
    log_every: OptionalInt = None
    """The number of steps between entries of the log. Default: the preset's."""
    seed: OptionalInt = None
    """The seed of initialisation, batches and noise. Default: the preset's."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], option("[{tensorboard,wandb,trackio} ...]")
    ] = ()
    """Experiment trackers to log to, beside log.jsonl."""
    push: OptionalText = None
    """Push the trained model to the Hub under this name; a new repository is private."""
    cache: OptionalPath = None
    """The directory for encoded corpora. Default: the user's cache directory."""

    def run(self) -> None:
        """Trains."""
        from diffusionbert.cli.train_run import start

        start(self)


@dataclass(frozen=True)
class Train(Run):
    """Train a diffusion model: from scratch, from a masked language model, or from another run.

    Example: diffusionbert train --preset tiny --data pydoc --output runs/tiny
    """

    start: OptionalText = None
    """The network to start from: the folder or Hub name of a masked language model (of a causal one for a decoder), a
    run directory, an original .th file, or bundled. Default: random parameters."""
    system: OptionalText = None
    """A system of the paper or one of its peers by name, which sets objective, start and time embedding:
    diffusionbert, d3pm, mdlm, genmd4, oa-ardm, multinomial, diffusion-lm, diffuseq, bert-mouth, cmlm, sundae, decoder,
    …; all are in docs/methods.md. Default: the preset's objective."""
    objective: OptionalText = None
    """An objective by name, with its settings if they differ from the defaults: discrete-time, continuous-time,
    order-agnostic, gaussian:floor=0.01, … Default: the system's."""
    schedule: OptionalText = None
    """A noise schedule by name: linear, cosine, sqrt, spindle, spindle:strength=0.3,mean=sentence,floor=0.05, …
    Default: the system's."""
    time_sampling: OptionalText = None
    """The distribution of training times: uniform, early, bell, bell:depth=0.8,weighted=false. Without importance
    weights the loss is not a bound, but the model gets better. Default: the system's."""
    diffusion_steps: OptionalInt = None
    """T, the number of steps of the time grid. Default: the system's."""
    quantity: Annotated[Literal["strict", "paper"] | None, option("{strict,paper}")] = None
    """strict is a bound on the likelihood; paper, on which the published spindle figures rest, is not. Default: the
    system's."""
    hybrid: OptionalFloat = None
    """The weight of D3PM's auxiliary cross-entropy. Default: the system's."""
    noise: Annotated[Literal["absorbing", "uniform"] | None, option("{absorbing,uniform}")] = None
    """The forward process: tokens become [MASK] or random tokens. Default: the system's."""
    time: Annotated[
        Literal["none", "prefix", "layers", "layers-learned"] | None, option("{none,prefix,layers,layers-learned}")
    ] = None
    """The time conditioning of the network: none (TAD), prefix (PTE), layers or layers-learned (LTE). Default: the
    system's."""


@dataclass(frozen=True)
class Pretrain(Run):
    """Pretrain a masked language model or a decoder.

    Example: diffusionbert pretrain --data corpus.txt.gz --output runs/masked
    """

    decoder: bool = False
    """Pretrain a causal language model of the same size instead."""
