"""The protocol card: under what conventions a likelihood was found. Two numbers compare if their cards agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from diffusionbert import __version__
from diffusionbert.likelihood.intervals import RESAMPLES

SAMPLED_INTERVAL = f"95 %, over sentences and draws: percentile bootstrap of {RESAMPLES} resamples"
GIVEN_INTERVAL = "95 %, over draws alone, the sentences being given: Student's t"


class Length(Enum):
    """Whether a sentence's nats contain what its length costs."""

    GIVEN = "given"
    MODELLED = "modelled and added"


class Limit(Enum):
    """Why the asked precision was not reached."""

    SENTENCES = "sentences"
    """Draws are under a tenth of the variance; only more sentences narrow the interval."""
    DRAWS = "draws"
    """The allowed draws were used up, and more of them would narrow the interval."""
    INFINITE = "infinite"
    """Some sentence is impossible to the method, so that no draws make the estimate finite."""


@dataclass(frozen=True)
class Protocol:
    """How a number came about: what must be the same for two numbers to be compared.

    Whoever asks for an estimate says the upper half; `evaluation.estimate` fills in the lower one.
    """

    steps: str = "not said"
    """For example "512 steps", "continuous time" or "any order"."""
    data: str | None = None
    """A hash of the sentences."""
    weights: str | None = None
    """A hash of the weights."""
    unit: str = "token of the model's vocabulary"
    text: str = "words between white space and UTF-8 bytes of the text as read, cleaned and cased as for the model"
    special_tokens: bool = False
    """Whether `[CLS]`, `[SEP]` and padding are counted."""
    packed: bool = False
    """Whether rows are pieces of running text, and not single sentences."""

    length: Length = Length.GIVEN
    interval: str = "none"
    num_draws: int = 0
    """Draws for each sentence."""
    strata: int = 1
    """Slices of time, each of which has the same number of draws."""
    seed: int = 0
    precision: float | None = None
    arithmetic: str = "float32"
    version: str = __version__

    def to_json(self) -> dict[str, Any]:
        """Gives the card as plain data."""
        return asdict(self) | {"length": self.length.value}
