"""What to reproduce of the paper, and on which text: the settings of an output folder, and flags of `reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Request:
    """Stored in the output folder; another call on the same folder must have the same settings."""

    scale: Literal["smoke", "19m", "34m"] = "smoke"
    """smoke: minutes on two cores, with figures that mean nothing. 19m: 18.8M parameters, as the bundled model; two
    minutes per system on one GPU. 34m: 33.8M parameters."""
    data: str = "pydoc"
    """The training corpus, as for train."""
    validation: str | None = None
    """A validation corpus; by default a share of the data is held out."""
    test: str | None = None
    """The corpus to evaluate on; by default that of --validation, or what training held out."""
    other_test: str | None = None
    """A corpus of another domain, on which likelihoods are computed as well."""
    pretraining_data: str | None = None
    """The corpus on which the networks to start from are pretrained; by default the same as data."""
    masked: str | None = None
    """A masked language model to start from; by default one is pretrained."""
    decoder: str | None = None
    """A causal language model to start from; by default one is pretrained."""
    vocabulary: str | None = None
    """A model folder or Hub name whose vocabulary all systems use; by default that of the masked language model."""
    steps: int | None = None
    """Training steps of every system; by default those of the scale."""
    seed: int = 0
