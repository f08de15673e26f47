"""All likelihoods of a trained model: over its own time grid, and in continuous time.

    grid          the T-step bound of training, which D3PM and DiffusionBERT report; it falls as T grows
    continuous    T → ∞, which MDLM reports; the lowest of all time grids where tokens cost no less the more is masked
    exact         the NLL of a causal model, left to right
    vectors       Diffusion-LM's bound: steps on embeddings, and rounding to tokens
    pseudo        BERT-Mouth's pseudo-likelihood: each token given all others, which is not a distribution

They are different numbers and never share a column. `building.scoring` says which one is the model's own. The
estimation itself is in `likelihood.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionbert.building import Lexicon, own_objective, scoring
from diffusionbert.experiments import (
    ContinuousDiffusion,
    Diffusion,
    Experiment,
    MouthMasking,
    NextWord,
    VectorDiffusion,
)
from diffusionbert.likelihood.evaluation import Effort, Rows, estimate
from diffusionbert.likelihood.protocol import Protocol
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.method import Estimator, Likelihood, LikelihoodDefinition, TimeGrid
from diffusionbert.methods.discrete import Quantity
from diffusionbert.methods.grid_in_any_order import GridInAnyOrder
from diffusionbert.model import Model, Way
from diffusionbert.schedules import uniform_grid
from diffusionbert.shapes import Batch
from diffusionbert.storage.component import Component
from diffusionbert.text.canvas import batch_of
from diffusionbert.text.vocabulary import Vocabulary

GRID, CONTINUOUS, EXACT, VECTORS, PSEUDO = "grid", "continuous", "exact", "vectors", "pseudo"
"""The names of likelihoods in results and tables."""


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


def ways_to_score(experiment: Experiment, lexicon: Lexicon) -> Ways:
    """All likelihoods that are valid for a model."""
    own = scoring(experiment, lexicon)
    settings = experiment.objective
    if own[0].likelihood is Likelihood.NONE:
        return Ways({}, ("this method has no likelihood and no bound: judge it by its samples",))
    if isinstance(settings, NextWord):
        return Ways({EXACT: own})
    if isinstance(settings, VectorDiffusion):
        return Ways({VECTORS: own})
    if isinstance(settings, MouthMasking):
        pseudo = LikelihoodDefinition("pseudo-likelihood", estimator=Estimator.LEAVE_ONE_OUT)
        return Ways({CONTINUOUS: own, PSEUDO: (own_objective(experiment, lexicon), pseudo)})
    if not isinstance(settings, Diffusion):
        return Ways({CONTINUOUS: own})
    if own[1].estimator is Estimator.ORDER_AGNOSTIC:
        grid = GridInAnyOrder(settings.schedule, uniform_grid(settings.num_steps), lexicon.mask_id)
        definition = replace(own[1], time=TimeGrid(settings.num_steps), schedule=Component.of(settings.schedule))
        return Ways({CONTINUOUS: own, GRID: (grid, definition)})
    if settings.uniform_noise:
        return Ways({GRID: own}, ("the continuous-time bound exists for [MASK] noise only",))
    if settings.quantity is Quantity.PAPER and settings.schedule.by_token:
        return Ways({GRID: own}, ("no bound: the model was trained by the paper's quantity, which is not one",))
    limit = scoring(replace(experiment, objective=ContinuousDiffusion(settings.schedule)), lexicon)
    return Ways({GRID: own, CONTINUOUS: limit})


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
