"""Mask-predict (Ghazvininejad et al. 2019, "Mask-Predict", section 3).

    round k = 1 … T:  every masked position gets a token and its probability,
                      then the ⌊n·(T - k) / T⌋ least probable of all n editable positions are masked again

A position that was not predicted in this round keeps the probability of its last prediction. The paper takes the most
probable token (`top_k=1`); here tokens are drawn, as in all samplers. They come from f and not from f·(1 - ᾱ_t), since
the sampler and not the noise chooses what is masked: the schedule plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerPosition, PositionMask, TargetLogProbs, per_position
from diffusionbert.diffusion.tokens import draw, log_prob_of
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State, masked_share


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPredictState(State):
    """The masked positions, and the probability of every prediction."""

    masked: PositionMask
    probability: PerPosition
    num_rounds: int


@final
@register("mask-predict")
@dataclass(frozen=True)
class MaskPredict(Sampler):
    """Predicts all masked tokens in each round and masks the least probable again.

    A sequence with fewer positions than rounds finishes early. A time-conditioned network is given the masked share of
    the editable positions, times the start time: (T - k) / T, rounded to whole positions.
    """

    def resolve(self, context: SamplingContext) -> MaskPredict:
        """Rejects noise other than [MASK]."""
        context.absorbing(self)
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> MaskPredictState:
        """All editable positions masked."""
        x = context.absorbing(self).prior(canvas, Noise(seed))
        return MaskPredictState(
            context=context,
            canvas=canvas,
            seed=seed,
            tokens=x.tokens,
            time=masked_share(context, x),
            calls=torch.zeros_like(canvas.example),
            done=not bool(canvas.editable.any()),
            masked=canvas.editable,
            probability=torch.zeros_like(x.tokens, dtype=torch.float64),
            num_rounds=0,
        )

    def query(self, state: MaskPredictState) -> Query | None:
        """All masked positions."""
        return Query.of(state.x, state.time, state.masked)

    def update(self, state: MaskPredictState, answer: TargetLogProbs) -> MaskPredictState:
        """Predicts the masked tokens, then masks the least probable of the sequence."""
        context, num_rounds, steps = state.context, state.num_rounds + 1, state.context.config.steps
        # Probabilities before top-k and temperature: after top_k=1 every token would be certain.
        log_p = context.exclusion(answer)
        uniform = Noise(state.seed, step=num_rounds).per_position(state.x, Purpose.SAMPLE)
        tokens = draw(context.warper(log_p), uniform[state.masked])
        predicted = per_position(log_prob_of(log_p, tokens).exp(), state.masked)
        probability = torch.where(state.masked, predicted, state.probability)
        editable = state.canvas.editable
        num_masked = editable.sum(dim=1) * (steps - num_rounds) // steps
        order = probability.masked_fill(~editable, torch.inf).argsort(dim=1, stable=True)
        masked = order.argsort(dim=1) < num_masked[:, None]
        text = state.tokens.masked_scatter(state.masked, tokens).masked_fill(masked, context.mask_id)
        return replace(
            state,
            tokens=text,
            time=masked_share(context, replace(state.canvas, tokens=text)),
            calls=state.calls + state.masked.any(dim=1),
            done=not bool(masked.any()),
            masked=masked,
            probability=probability,
            num_rounds=num_rounds,
        )
