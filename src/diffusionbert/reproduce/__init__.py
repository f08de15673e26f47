"""Reproduces the paper's tables and figures from a folder of runs; a `Request` says at what scale and on which text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

OptionalText = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to reproduce: the settings of an output folder, and the options of the command `reproduce`."""

    scale: Literal["smoke", "19m", "34m"] = "smoke"
    """The size of the experiment.
    smoke: minutes on two cores, with meaningless figures.
    19m: 18.8M parameters, two minutes per system on one GPU.
    34m: 33.8M parameters."""
    backbone: Literal["bert", "modern"] = "bert"
    """The family of new networks: BERT (causal: GPT-2), or ModernBERT's layers for both."""
    data: str = "pydoc"
    """The training corpus, as for train."""
    validation: OptionalText = None
    """A validation corpus. Default: a fraction of the data is held out."""
    test: OptionalText = None
    """The corpus to evaluate on. Default: the --validation corpus, or the text held out from training."""
    other_test: OptionalText = None
    """A corpus of another domain on which to compute likelihoods, too."""
    pretraining_data: OptionalText = None
    """The corpus for pretraining the networks that systems start from. Default: the same as --data."""
    masked: OptionalText = None
    """A masked language model to start from. Default: one is pretrained."""
    decoder: OptionalText = None
    """A causal language model to start from. Default: one is pretrained."""
    vocabulary: OptionalText = None
    """A model folder or Hub name whose vocabulary all systems use. Default: that of the masked language model."""
    steps: OptionalInt = None
    """Training steps per system. Default: set by the scale."""
    seed: int = 0
    """The training seed."""
    evaluation_seed: int = 0
    """The seed of draws and samples; the same for all training seeds, so that their runs share noise."""
