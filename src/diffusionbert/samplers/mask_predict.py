"""Mask-predict (Ghazvininejad et al. 2019, "Mask-Predict", section 3).

    round k = 1 … T:  every masked position gets a token and its probability,
                      then the ⌊n·(T - k) / T⌋ least probable of all n editable positions are remasked

A position that was not predicted in this round keeps the probability of its last prediction. The paper takes the most
probable token (`top_k=1`); here tokens are drawn, as in all samplers. They come from f, not from f·(1 - ᾱ_t): the
sampler rather than the noise chooses what is masked, so the schedule plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerPosition, TargetLogProbs, per_position
from diffusionbert.registry import register
from diffusionbert.samplers.base import (
    RoundSampler,
    RoundState,
    SamplingContext,
    draw_with_probability,
    masked_fraction,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPredictState(RoundState):
    """The masked positions, and the probability of every prediction."""

    probability: PerPosition


@register("mask-predict")
@dataclass(frozen=True)
class MaskPredict(RoundSampler):
    """Predicts all masked tokens in each round and remasks the least probable.

    A sequence with fewer positions than rounds finishes early.
    """

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> MaskPredictState:
        x = context.absorbing(self).prior(canvas, Noise(seed))
        own = {"masked": canvas.editable, "probability": torch.zeros_like(x.tokens, dtype=torch.float64)}
        return MaskPredictState.begin(context, canvas, seed, x.tokens, masked_fraction(context, x), num_rounds=0, **own)

    def update(self, state: MaskPredictState, answer: TargetLogProbs) -> MaskPredictState:
        context, num_rounds, steps = state.context, state.num_rounds + 1, state.context.config.steps
        uniform = Noise(state.seed, step=num_rounds).per_position(state.x, Purpose.SAMPLE)
        tokens, predicted = draw_with_probability(context, answer, uniform[state.masked])
        probability = torch.where(state.masked, per_position(predicted, state.masked), state.probability)
        editable = state.canvas.editable
        num_masked = editable.sum(dim=1) * (steps - num_rounds) // steps
        order = probability.masked_fill(~editable, torch.inf).argsort(dim=1, stable=True)
        masked = order.argsort(dim=1) < num_masked[:, None]
        text = state.tokens.masked_scatter(state.masked, tokens).masked_fill(masked, context.mask_id)
        time, done = masked_fraction(context, replace(state.canvas, tokens=text)), not bool(masked.any())
        own = {"masked": masked, "probability": probability, "num_rounds": num_rounds}
        return state.advance(text, time, state.masked.any(dim=1), done, **own)
