"""The protocol of a likelihood: which number it is and how it was estimated. Two numbers compare if these agree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diffusionbert import __version__
from diffusionbert.likelihood.intervals import RESAMPLES
from diffusionbert.objectives.base import LikelihoodDefinition


class Length(Enum):
    """Whether the nats of a sentence include -log p(length)."""

    GIVEN = "given"
    MODELLED = "modelled"


class Interval(Enum):
    """What a 95 % interval covers."""

    SENTENCES_AND_DRAWS = "sentences and draws"
    """The sentences are a sample of a language."""
    DRAWS = "draws"
    """The sentences are given."""

    def __str__(self) -> str:
        if self is Interval.DRAWS:
            return "95 % interval over draws, the sentences being given: Student's t"
        return f"95 % interval over sentences and draws: percentile bootstrap of {RESAMPLES} resamples"


class Limit(Enum):
    """Why the requested precision was not reached."""

    SENTENCES = "sentences"
    """Draws contribute less than a tenth of the variance; only more sentences narrow the interval."""
    DRAWS = "draws"
    """The maximum number of draws was used; more would narrow the interval."""
    INFINITE = "infinite"
    """Some sentence has probability 0 under the model."""


@dataclass(frozen=True)
class Protocol:
    """What must be known of a likelihood to compare it with another.

    The caller of `evaluation.estimate` provides the fields up to `packed`; `estimate` fills in the rest.
    """

    definition: LikelihoodDefinition = LikelihoodDefinition()
    data: str | None = None
    """SHA-256 of the sentences."""
    weights: str | None = None
    """SHA-256 of the weights."""
    source_given: bool = False
    """Whether the likelihood is conditional on a source sentence."""
    special_tokens: bool = False
    """Whether `[CLS]`, `[SEP]` and padding are counted as tokens."""
    packed: bool = False
    """Whether sequences are pieces of running text rather than single sentences."""

    length: Length = Length.GIVEN
    interval: Interval | None = None
    num_draws: int = 0
    """Draws per sentence."""
    strata: int = 1
    """Slices of time, each with the same number of draws."""
    seed: int = 0
    precision: float | None = None
    """The requested half-width of the interval, relative to the perplexity per token."""
    arithmetic: str = "float32"
    version: str = __version__
    """Of this package."""
