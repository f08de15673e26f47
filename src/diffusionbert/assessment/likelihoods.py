"""Every likelihood that a trained model has: over its own grid of steps, and in the limit of ever finer ones.

    grid          Σ over the T steps of training: what D3PM and DiffusionBERT report; it falls as T grows
    continuous    T → ∞: what MDLM reports; the least of all grids where words cost no less the more is hidden
    exact         a decoder's: one token after another
    vectors       Diffusion-LM's: steps on vectors, and the rounding to words
    pseudo        BERT-Mouth's: each token given all others, which belongs to no distribution

They are different numbers of one model and never share a column. `ObjectiveConfig.scoring_quantities` says
which ones a model has, its own first; estimation itself is in `evaluation`.
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
    """How a model's sentences can be scored; its own way first."""

    by_name: dict[str, Way]
    notes: tuple[str, ...] = ()
    """Why others are missing."""

    @property
    def primary(self) -> str | None:
        """The model's own way; None if it has no likelihood."""
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
    """The likelihood of rows, whatever they are made of; that of sentences is `Model.likelihood`."""
    objective, steps = way
    return estimate(
        model.method(objective.to(model.device)),
        rows,
        effort,
        protocol=replace(protocol, steps=steps),
        advance=advance,
    )


@final
@dataclass(frozen=True, eq=False)
class PackedRows:
    """Full rows of running text: sentences one after another, cut wherever a row is full; the rest is not used.

    Between sentences stands nothing, because a model of single sentences cannot write `[SEP]`.
    """

    vocabulary: Vocabulary
    texts: Sequence[str]
    places: int
    """Of a row, special tokens included."""

    @cached_property
    def rows(self) -> list[list[int]]:
        """The tokens of each row, in the tokenizer's frame."""
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
        """All the same."""
        return np.full(len(self.rows), self.places, np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Rows side by side; all but the frame is editable."""
        picked = batch_of(self.vocabulary, [self.rows[index] for index in indices])
        editable = ~self.vocabulary.special[picked.tokens]
        return replace(picked, editable=editable, example=torch.tensor(indices))
