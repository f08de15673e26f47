"""The options of `train` and `pretrain`; `start` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Run:
    """Options that `train` and `pretrain` share. What is left out is the preset's."""

    output: Path
    """The run directory: configuration, log, checkpoints and, in the end, the model."""
    data: str | None = None
    """A text file (.gz, .xz, .zst), a folder or glob; .jsonl with --field; .tsv pairs; pydoc; lm1b:FOLDER; hf:NAME."""
    preset: Literal["tiny", "small", "paper", "wiki-small", "wiki-medium"] | None = None
    """tiny (the default): two cores, about a minute. small, wiki-small (the bundled model's), wiki-medium: one GPU,
    minutes. paper: BERT-base, 1.9M steps."""
    config: Path | None = None
    """A run's configuration (run.json) in place of a preset; other options change it."""
    auto: bool = False
    """Measure this machine first: choose the micro-batch that fits, and report how long the run will take."""
    resume: bool = False
    """Continue the run in the output directory exactly from its last checkpoint. Settings of training may be changed;
    data, network and objective stay what they were, and may be left out."""
    validation: str | None = None
    """A corpus to validate on; else a share of the data is held out."""
    field: str | None = None
    """The field of JSON lines that holds the text (or the source of a pair)."""
    target_field: str | None = None
    """The field that holds the target of a pair."""
    vocabulary: int | str | None = None
    """The size of a WordPiece to be trained on the data, or a tokenizer's folder or name."""
    max_length: int | None = None
    """Sentences of more tokens are skipped, and counted."""
    cased: bool = False
    """Keep upper case; else text is lower-cased."""
    detokenise: bool = False
    """Undo tokenised text such as LM1B's: "it 's" becomes "it's"."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    dropout: float | None = None
    steps: int | None = None
    """Training steps."""
    batch_tokens: int | None = None
    """Tokens per global batch, padding included."""
    batch_sequences: int | None = None
    """Or: sentences per global batch."""
    micro_tokens: int | None = None
    """The most tokens at once on one device; larger batches are accumulated."""
    learning_rate: float | None = None
    """The preset's if left out; with --start at most 1e-4 if the start is a diffusion model, or the preset is tiny."""
    warmup: int | None = None
    decay: Literal["linear", "cosine", "inverse_sqrt", "constant_with_warmup"] | None = None
    ema: float | None = None
    """Keep an exponential moving average of the parameters with this decay, such as 0.9999; it is validated and
    exported."""
    precision: Literal["no", "bf16", "fp16"] | None = None
    compile: bool = False
    sharded: bool = False
    """Over several processes, shard the network (FSDP) instead of copying it (DDP)."""
    patience: int | None = None
    """Stop after so many validations without improvement."""
    validate_every: int | None = None
    save_every: int | None = None
    log_every: int | None = None
    seed: int | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    push: str | None = None
    """Push the trained model to the Hub under this name; a new repository is private."""
    cache: Path | None = None
    """Where encoded corpora are kept."""

    def run(self) -> None:
        """Trains."""
        from diffusionbert.cli.train_run import start

        start(self)


@dataclass(frozen=True)
class Train(Run):
    """Train a diffusion model: from scratch, from a masked language model, or from another run.

    Example: diffusionbert train --preset tiny --data pydoc --output runs/tiny
    """

    start: str | None = None
    """A masked language model's folder or Hub name, a run directory, an original .th file, or bundled; else from
    scratch. For a decoder, a causal language model."""
    system: str | None = None
    """A system of the paper or one of its peers, by name: objective, start and time embedding at once; docs/methods.md
    has all. diffusionbert, d3pm, mdlm, genmd4, oa-ardm, multinomial, diffusion-lm, diffuseq, bert-mouth, cmlm, sundae,
    decoder, …"""
    objective: str | None = None
    """An objective by name, with settings that differ from its defaults: discrete-time, continuous-time,
    order-agnostic, gaussian:floor=0.01, …"""
    schedule: str | None = None
    """A noise schedule by name: linear, cosine, sqrt, spindle, spindle:strength=0.3,mean=sentence,floor=0.05."""
    time_sampling: str | None = None
    """How training draws times: uniform, early, bell, bell:depth=0.8,weighted=false. Without weights the middle counts
    more: the loss is then no bound, and the model better."""
    diffusion_steps: int | None = None
    """T, the number of steps of the time grid."""
    quantity: Literal["strict", "paper"] | None = None
    """strict is a bound; paper is what the published spindle figures use, and is not."""
    hybrid: float | None = None
    """Weight of D3PM's auxiliary cross-entropy."""
    noise: Literal["absorbing", "uniform"] | None = None
    time: Literal["none", "prefix", "layers", "layers-learned"] | None = None
    """How the time reaches the network: TAD, PTE, LTE."""
