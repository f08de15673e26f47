"""Ancestral sampling (Ho et al. 2020, algorithm 2; Austin et al. 2021, D3PM).

    x_1 ~ prior,   x_s ~ p(x_s | x_t)  for every step (s, t) of the time grid, from the last to the first

It suits every process on tokens and every network. The network is called once per step while anything is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from diffusionbert.diffusion.shapes import Batch, TargetLogProbs
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext
from diffusionbert.samplers.time_grid import GridState, after_step, draw_step, query_grid, start_grid


@final
@register("ancestral")
@dataclass(frozen=True)
class Ancestral(Sampler):
    """Makes one reverse step after another."""

    def resolve(self, context: SamplingContext) -> Ancestral:
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
        """x_s ~ p(x_s | x_t)."""
        return after_step(state, draw_step(state, answer, state.interval[0]).tokens)
