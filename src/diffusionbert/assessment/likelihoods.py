"""All likelihoods of a trained model: over its own time grid, and in continuous time.

    grid          the T-step bound of training, which D3PM and DiffusionBERT report; it falls as T grows
    continuous    T → ∞, which MDLM reports; the lowest of all time grids where tokens cost no less the more is masked
    exact         the NLL of a causal model, left to right
    vectors       Diffusion-LM's bound: steps on embeddings, and rounding to tokens
    pseudo        BERT-Mouth's pseudo-likelihood: each token given all others, which is not a distribution

They are different numbers and never share a column. `ObjectiveConfig.scoring_quantities` says which ones a model has,
its own first. The estimation itself is in `likelihood.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.likelihood.evaluation import Effort, Rows, estimate
from diffusionbert.likelihood.protocol import Protocol
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.model import Model, Way
from diffusionbert.shapes import Batch
from diffusionbert.text.canvas import batch_of
from diffusionbert.text.vocabulary import Vocabulary
from diffusionbert.training.config import RunConfig


@final
@dataclass(frozen=True, eq=False)
class Ways:
    """The likelihoods of a model by name; its own first."""

    by_name: dict[str, Way]
    notes: tuple[str, ...] = ()
    """Why others do not exist."""

    @property
    def primary(self) -> str | None:
        """The name of the model's own likelihood; None if it has none."""
        return next(iter(self.by_name), None)


def ways_to_score(config: RunConfig, statistics: TokenStatistics) -> Ways:
    """All likelihoods that are valid for a model."""
    found = config.objective.scoring_quantities(config.time)
    by_name = {each.name: (each.build(statistics), each.definition) for each in found.available}
    return Ways(by_name, found.notes)


def score_rows(
    model: Model,
    way: Way,
    rows: Rows,
    effort: Effort,
    *,
    protocol: Protocol,
    advance: Callable[[int], None] = lambda num_sentences: None,
) -> Estimate:
    """The likelihood of any encoded sequences; `Model.likelihood` is that of sentences."""
    objective, definition = way
    return estimate(
        model.method(objective.to(model.device)),
        rows,
        effort,
        protocol=replace(protocol, definition=definition),
        advance=advance,
    )


@final
@dataclass(frozen=True, eq=False)
class PackedRows:
    """Full sequences of running text: sentences are concatenated and cut wherever a sequence is full; the rest is
    dropped.

    Nothing separates the sentences, because a model of single sentences cannot generate `[SEP]`.
    """

    vocabulary: Vocabulary
    texts: Sequence[str]
    places: int
    """Tokens of a sequence, special ones included."""

    @cached_property
    def rows(self) -> list[list[int]]:
        """The tokens of each sequence, with the tokenizer's special tokens around them."""
        special = self.vocabulary.special
        framed = self.vocabulary.encode(self.texts)
        running = [token for row in framed for token in row if not special[token]]
        room = self.places - self.vocabulary.num_special(paired=False)
        own = [place for place, token in enumerate(framed[0]) if not special[token]]
        before, after = framed[0][: own[0]], framed[0][own[-1] + 1 :]
        starts = range(0, len(running) - room + 1, room)
        return [[*before, *running[start : start + room], *after] for start in starts]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """All equal."""
        return np.full(len(self.rows), self.places, np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """A batch in which everything but the special tokens is editable."""
        picked = batch_of(self.vocabulary, [self.rows[index] for index in indices])
        editable = ~self.vocabulary.special[picked.tokens]
        return replace(picked, editable=editable, example=torch.tensor(indices))
