"""`train` and `pretrain`: their options; what they do is in `start`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Run:
    """Options that `train` and `pretrain` share. What is left out, the preset decides."""

    output: Path
    """The run folder: log, checkpoints, and in the end the model."""
    data: str | None = None
    """A text file (.gz, .xz, .zst), a folder or glob; .jsonl with --field; .tsv pairs; pydoc; lm1b:FOLDER; hf:NAME."""
    preset: Literal["tiny", "small", "paper", "wiki-small", "wiki-medium"] = "tiny"
    """tiny: two cores, about a minute. small, wiki-small (the bundled model's), wiki-medium: one GPU, minutes.
    paper: BERT-base, 1.9M steps."""
    auto: bool = False
    """Measure this machine first: choose the micro-batch that fits, and say how long the run will take."""
    resume: bool = False
    """Go on with the run in the output folder, exactly where its last checkpoint was. Settings of training may be
    given anew; data, network and method stay what they were, and may be left out."""
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

    def run(self) -> None:
        """Trains."""
        from diffusionbert.commands.start import start

        start(self)


@dataclass(frozen=True)
class Pretrain(Run):
    """Pretrain a masked language model by ordinary masking, or a decoder by next words.

    Example: diffusionbert pretrain --data corpus.txt.gz --output runs/masked
    """

    decoder: bool = False
    """A causal language model of the same size, trained to say the next word."""


@dataclass(frozen=True)
class Train(Run):
    """Train a diffusion model: from scratch, from a masked language model, or from another run.

    Example: diffusionbert train --preset tiny --data pydoc --output runs/tiny
    """

    start: str | None = None
    """A masked language model's folder or Hub name, a run folder, or an original .th file; else from scratch.
    For a decoder, a causal language model."""
    system: str | None = None
    """A system of the paper or one of its peers, by name: method, network and time at once; docs/methods.md has all.
    diffusionbert, d3pm, mdlm, genmd4, oa-ardm, multinomial, diffusion-lm, diffuseq, bert-mouth, cmlm, sundae,
    decoder, …"""
    method: Literal["diffusion", "continuous", "any-order"] | None = None
    """Diffusion over a grid of steps or in continuous time, or one token at a time in any order; options below say
    the rest."""
    schedule: Literal["linear", "cosine", "sqrt", "spindle", "spindle-sentence"] | None = None
    strength: float | None = None
    """λ of the spindle; 0.3 if left out."""
    floor: float | None = None
    """Share of linear mixed into the spindle; 0.05 with the sentence mean, else 0. Of word vectors, the variance of
    clean ones: 1e-4, or 0.01 with sqrt."""
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
    """Draw times from a bell of this depth (0.8; 0 is evenly)."""
    bell_unweighted: bool = False
    """Do not weigh the bell's draws back: times in the middle then count more. No bound while training, and better."""
