"""Gibbs sampling (Wang & Cho 2019, "BERT has a mouth, and it must speak", section 3).

    first pass    all editable positions are unmasked, in an order drawn for each sequence or left to right
    sweeps        one position is masked and drawn again from f(· | all other tokens): a random one, or the next

An iteration is one network call. With fewer iterations than positions, the first pass unmasks several at once, evenly
(`due_after`). With as many, it is the order-agnostic product of conditionals, exact if f is. Sweeps leave a
distribution unchanged if f gives its conditionals; a network's conditionals fit no joint distribution, so the limit
depends on the scan order. The authors' code picks a random position in every iteration from the start, so some may
never be unmasked; here the first pass leaves none out, as described by He et al. 2022 (DiffusionBERT). The schedule
plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, PositionMask, TargetLogProbs
from diffusionbert.diffusion.tokens import draw
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State, due_after, masked_fraction


class Order(Enum):
    """Which position comes next, in the first pass and in sweeps."""

    RANDOM = "random"  # each sequence in its own order; in sweeps any position, even the same one again
    LEFT_TO_RIGHT = "left-to-right"


@dataclass(frozen=True, eq=False, kw_only=True)
class GibbsState(State):
    """The positions that the next iteration draws."""

    due: PositionMask
    num_iterations: int


@register("gibbs")
@dataclass(frozen=True)
class Gibbs(Sampler):
    """Draws position by position, then keeps resampling for the remaining iterations.

    Every sequence with an editable position takes all iterations. A time-conditioned network is given the masked
    fraction of the editable positions, times the start time.

    Args:
        order: Which position comes next.
    """

    order: Order = Order.RANDOM

    def resolve(self, context: SamplingContext) -> Gibbs:
        context.absorbing(self)
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> GibbsState:
        x = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, context.mask_id))
        due, time = self._due(context, x, seed, 0), masked_fraction(context, x)
        return GibbsState.begin(context, canvas, seed, x.tokens, time, due=due, num_iterations=0)

    def query(self, state: GibbsState) -> Query | None:
        x = replace(state.canvas, tokens=state.tokens.masked_fill(state.due, state.context.mask_id))
        return Query.of(x, masked_fraction(state.context, x), state.due)

    def update(self, state: GibbsState, answer: TargetLogProbs) -> GibbsState:
        context, number = state.context, state.num_iterations + 1
        uniform = Noise(state.seed, step=state.num_iterations).per_position(state.x, Purpose.SAMPLE)
        tokens = draw(context.warper(answer), uniform[state.due])
        x = replace(state.canvas, tokens=state.tokens.masked_scatter(state.due, tokens))
        time, called = masked_fraction(context, x), state.canvas.editable.any(dim=1)
        own = {"due": self._due(context, x, state.seed, number), "num_iterations": number}
        return state.advance(x.tokens, time, called, number == context.config.steps, **own)

    def _due(self, context: SamplingContext, x: Batch, seed: int, number: int) -> PositionMask:
        """The positions that iteration `number` draws: masked ones, or one that is already unmasked."""
        iterations = context.config.steps
        length = x.editable.sum(dim=1)
        first = self._earliest(x, due_after(number, length, iterations), seed) & (x.tokens == context.mask_id)
        if self.order is Order.RANDOM:
            # The first pass has used step 0 of this purpose, and sweeps begin at step 1 or later.
            again = Noise(seed, step=number).chosen(x, torch.ones_like(length))
        else:
            # The first pass of a sequence with sweeps takes n iterations, so its sweeps begin at its first position.
            again = x.editable & (x.editable.cumsum(dim=1) == 1 + (number % length.clamp(min=1))[:, None])
        return torch.where((number < length.clamp(max=iterations))[:, None], first, again)

    def _earliest(self, x: Batch, number: Counts, seed: int) -> PositionMask:
        """The first `number` editable positions of each sequence in its order."""
        if self.order is Order.RANDOM:
            return Noise(seed).chosen(x, number)
        return x.editable & (x.editable.cumsum(dim=1) <= number[:, None])
