"""Renoising (He et al. 2022, DiffusionBERT): each step predicts the whole text and masks it afresh.

    x̂0 ~ p(x0 | x_t, t) at the masked positions, x_t elsewhere;    x_s ~ q(x_s | x̂0)    for every step (s, t)

An unmasked token is remasked with probability 1 - ᾱ_s, so that tokens that do not fit can be replaced later. Ancestral
sampling draws from q(x_s | x_t, x̂0) instead and keeps unmasked tokens.

This is ReMDM (`remasking`, Wang et al. 2025) with σ = 1 - ᾱ_s. Its probability of unmasking is then
(ᾱ_s - ᾱ_s·ᾱ_t) / (1 - ᾱ_t) = ᾱ_s at masked and unmasked positions alike, so x_s depends on x_t through x̂0 alone. It is
not ReMDM's maximum min(1, (1 - ᾱ_s) / ᾱ_t), which is larger: as long as that is below 1, σ is the share ᾱ_t of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from diffusionbert.diffusion.shapes import Batch, TargetLogProbs
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext
from diffusionbert.samplers.time_grid import GridState, after_step, draw_step, query_grid, start_grid


@final
@register("renoising")
@dataclass(frozen=True)
class Renoising(Sampler):
    """Predicts the text and adds noise again in every step; for every process on tokens."""

    def resolve(self, context: SamplingContext) -> Renoising:
        """Rejects models that are no diffusion on tokens."""
        context.tokens_process(self)
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> GridState:
        """A draw from the prior."""
        return start_grid(context, canvas, seed)

    def query(self, state: GridState) -> Query | None:
        """The masked positions (under uniform noise: all editable ones)."""
        return query_grid(state)

    def update(self, state: GridState, answer: TargetLogProbs | None) -> GridState:
        """x_s ~ q(x_s | x̂0); a step down to 0 draws x̂0 from p(x0 | x_t, t)."""
        s, t = state.interval
        x0_hat = draw_step(state, answer, torch.zeros_like(t))
        return after_step(state, state.process.corrupt(x0_hat, s, state.noise).tokens)
