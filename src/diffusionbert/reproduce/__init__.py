"""The paper's tables and figures from a folder of runs; a `Request` says which, and on which text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

OptionalText = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to reproduce; the settings of an output folder, and flags of the command `reproduce`."""

    scale: Literal["smoke", "19m", "34m"] = "smoke"
    """smoke: minutes on two cores, with figures that mean nothing. 19m: 18.8M parameters; two
    minutes per system on one GPU. 34m: 33.8M parameters."""
    backbone: Literal["bert", "modern"] = "bert"
    """The family of new networks: BERT (causal: GPT-2), or ModernBERT's layers for both."""
    data: str = "pydoc"
    """The training corpus, as for train."""
    validation: OptionalText = None
    """A validation corpus. Default: a fraction of the data is held out."""
    test: OptionalText = None
    """The corpus to evaluate on. Default: that of --validation, or what training held out."""
    other_test: OptionalText = None
    """A corpus of another domain, on which likelihoods are computed as well."""
    pretraining_data: OptionalText = None
    """The corpus on which the networks to start from are pretrained. Default: the same as data."""
    masked: OptionalText = None
    """A masked language model to start from. Default: one is pretrained."""
    decoder: OptionalText = None
    """A causal language model to start from. Default: one is pretrained."""
    vocabulary: OptionalText = None
    """A model folder or Hub name whose vocabulary all systems use. Default: that of the masked language model."""
    steps: OptionalInt = None
    """Training steps of every system. Default: those of the scale."""
    seed: int = 0
    """The seed of training."""
    evaluation_seed: int = 0
    """The seed of draws and samples; the same for every seed of training, so that these share their noise."""
