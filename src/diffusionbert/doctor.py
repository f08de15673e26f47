"""What is wrong with generated text, why, and what mends it: the checks behind FIELD's most common complaints.

`examine` gathers a `Case`: what a model writes and when, or samples out of a file, and what its training corpus is like.
`diagnose` looks at a case and makes `Finding`s, each with a stable code. The two are apart, so that anything that has
samples, reveal times or counts can be diagnosed, also what this package did not write.

Thresholds lie between what real text and the bundled model show (64 samples, 1,800 tokens, top-k 30) and what was
broken on purpose; both are said where a threshold is set. Knows samplers by their settings alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.evaluation import Effort
from diffusionbert.metrics import distinct_n, repetition
from diffusionbert.model import Model, Moment, Task
from diffusionbert.sampling import Algorithm, Sampling
from diffusionbert.vocabulary import Vocabulary

Row = tuple[int, ...]
"""A sentence's own tokens."""
TENTHS = 10
TOP = 100
"""As many of the corpus's most frequent tokens are looked at."""
MOST_TOKENS = 2000
"""The entropy and the distinct n-grams of more than so many tokens are those of the first: both depend on the size."""
LEAST_TOKENS, LEAST_SAMPLES = 120, 8
"""From fewer, frequencies and lengths say nothing."""
PROBE = Sampling(steps=32)
"""How texts are written on which a network is tested, where no corpus is given: not sharpened, so that how sure the
network is shows."""


class Severity(IntEnum):
    """How bad it is."""

    BROKEN = 0
    """What comes out is not text of this model; nothing else needs looking at before."""
    POOR = 1
    """Text, but worse than the model can do."""
    NOTE = 2
    """Worth knowing."""


@final
@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    evidence: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        return asdict(self) | {"severity": self.severity.name.lower()}


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """What samples ought to be like: the counts and lengths of a corpus, and its sentences if they are at hand."""

    counts: Tensor
    length_histogram: Tensor | None
    rows: tuple[Row, ...] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[Row], size: int) -> Reference:
        """Counts sentences."""
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.long)
        lengths = torch.tensor([len(row) for row in rows])
        return cls(tokens.bincount(minlength=size), lengths.bincount(), tuple(rows))

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """The relative frequency of each token."""
        counts: NDArray[np.float64] = self.counts.double().numpy()
        return counts / counts.sum()

    @cached_property
    def frequent(self) -> NDArray[np.int64]:
        """The ids of the most frequent tokens."""
        return np.argsort(-self.shares, kind="stable")[:TOP]

    def frequency_distance(self, shares: NDArray[np.float64]) -> float:
        """½ Σ |difference| over the frequent tokens and the rest as one, over all that they could differ by."""
        own, other = self.shares[self.frequent], shares[self.frequent]
        return float(np.abs(own - other).sum() + abs(own.sum() - other.sum())) / 2 / float(own.sum())

    def entropy(self, num_tokens: int) -> float:
        """The expected entropy, in nats, of so many tokens drawn one by one: that of few is lower than that of all."""
        chance = np.random.default_rng(0)
        return float(np.mean([_entropy(chance.multinomial(num_tokens, self.shares)) for _ in range(4)]))


@final
@dataclass(frozen=True, eq=False)
class Case:
    """What there is to look at. Only the samples must be there."""

    vocabulary: Vocabulary
    texts: tuple[str, ...]
    reference: Reference | None = None
    """What they ought to be like."""
    stored: Reference | None = None
    """What the model says its training corpus was like."""
    corpus: tuple[str, ...] = ()
    written: tuple[Row, ...] = ()
    """The tokens of the samples as the network wrote them, before they became text."""
    reveals: tuple[tuple[float, ...], ...] = ()
    """For each sample, how far on its way (0 to 1) each place was written for good; see `reveals`."""
    expected_reveals: tuple[float, ...] = (1 / TENTHS,) * TENTHS
    """The share of places that the schedule writes in each tenth of the way."""
    sampling: Sampling | None = None
    """How the samples were made, if that is known."""
    length_asked: bool = False
    """Whether the samples have the lengths they have because someone wanted it so."""
    network_nats: float | None = None
    """What the network needs for a token of the corpus, or of what it writes itself."""
    unigram_nats: float | None = None
    """What word frequencies alone need for the same."""

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The samples as the vocabulary reads them."""
        return own_tokens(self.vocabulary, self.texts)

    @cached_property
    def first(self) -> tuple[Row, ...]:
        """As many samples as have `MOST_TOKENS`, or all."""
        ends = np.cumsum([len(row) for row in self.rows])
        return self.rows[: int(np.searchsorted(ends, MOST_TOKENS, side="right")) + 1]

    def counts(self, rows: Iterable[Row]) -> NDArray[np.int64]:
        """How often each token occurs in rows."""
        size = self.vocabulary.size if self.reference is None else len(self.reference.counts)
        return np.bincount([token for row in rows for token in row], minlength=size)


@final
@dataclass(frozen=True)
class Diagnosis:
    """All that was found, the most serious first, and the figures it rests on."""

    findings: tuple[Finding, ...]
    figures: dict[str, float | None]
    reveal_histogram: tuple[float, ...] | None = field(default=None)
    """The share of places written in each tenth of the way."""

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        return {
            "healthy": not self.findings,
            "findings": [finding.to_json() for finding in self.findings],
            "figures": self.figures,
            "reveal_histogram": self.reveal_histogram,
        }
