"""What of the paper is to be reproduced, on which text: the settings of a folder of runs, and flags of `reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Request:
    """Kept in the folder: another call must ask for the same."""

    scale: Literal["smoke", "19m", "34m"] = "smoke"
    """smoke: two cores, minutes, small numbers. 19m: 18.8M parameters, as the bundled model, one GPU, two minutes per
    system. 34m: 33.8M parameters."""
    data: str = "pydoc"
    """The text of training, as for train."""
    validation: str | None = None
    """A corpus to validate on; else a share of the data is held out."""
    test: str | None = None
    """The text that is assessed; else that of --validation, or what training held out."""
    other_test: str | None = None
    """A text of another kind, on which likelihoods are found, too."""
    pretraining_data: str | None = None
    """The text on which the networks to start from are pretrained; else the same as data."""
    masked: str | None = None
    """A masked language model to start from; else one is pretrained."""
    decoder: str | None = None
    """A causal language model to start from; else one is pretrained."""
    vocabulary: str | None = None
    """A model folder or a name whose vocabulary all systems have; else that of the masked language model."""
    steps: int | None = None
    """Training steps of every system; else those of the scale."""
    seed: int = 0
