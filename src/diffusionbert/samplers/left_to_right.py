"""Left-to-right generation with a key-value cache (Radford et al. 2019, GPT-2, section 2).

    x_i ~ p(v | x_1 … x_{i-1})        warped, at the editable positions i from left to right

The state caches the keys and values of all positions read so far, so each position is read once. Frozen positions are
read together with the tokens before the next editable position; frozen positions after the last editable one are never
read. So a sequence costs one call per generated token, and each call reads only what is new.

The canvas sets the length of a sequence: there is no end-of-text token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerPosition, TargetIndices, TargetLogProbs
from diffusionbert.diffusion.tokens import draw
from diffusionbert.networks.causal import KeyValues
from diffusionbert.registry import register
from diffusionbert.samplers.base import CausalQuery, Sampler, SamplingContext, State


@dataclass(frozen=True, eq=False, kw_only=True)
class LeftToRightState(State):
    """The cache, and the positions that are left."""

    uniform: PerPosition  # one number per position, to draw its token with
    positions: tuple[int, ...]  # the positions that some sequence still has to generate
    sequences: TargetIndices  # the unfinished sequences, which are those in the cache
    num_read: int  # the number of positions in the cache
    cache: KeyValues | None


@register("left-to-right")
@dataclass(frozen=True)
class LeftToRight(Sampler):
    """Generates one token per step, at the same position of all sequences; finished sequences are dropped.

    The time of a sequence is the fraction of its editable positions that are left.
    """

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return True

    def resolve(self, context: SamplingContext) -> LeftToRight:
        if not context.causal:
            raise ValueError(
                "the sampler 'left-to-right' is for a model that is a decoder, which this is not; leave it out"
            )
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> LeftToRightState:
        editable = canvas.editable
        if bool(editable[:, 0].any()):
            raise ValueError(
                "the first position of a sequence is editable, but a decoder generates after what it has read: "
                "let sequences begin with a token that is not editable, such as [CLS]"
            )
        own = {"uniform": Noise(seed).per_position(canvas, Purpose.SAMPLE), "num_read": 0, "cache": None}
        own |= {"positions": tuple(editable.any(dim=0).nonzero()[:, 0].tolist())}
        own |= {"sequences": editable.any(dim=1).nonzero()[:, 0]}
        tokens = canvas.tokens.masked_fill(editable, context.mask_id)
        return LeftToRightState.begin(context, canvas, seed, tokens, canvas.fraction_of(editable), **own)

    def query(self, state: LeftToRightState) -> CausalQuery:
        new = state.tokens[state.sequences, state.num_read : state.positions[0]]
        return CausalQuery(new, state.cache)

    def update(self, state: LeftToRightState, answer: tuple[TargetLogProbs, KeyValues]) -> LeftToRightState:
        (log_p, cache), (position, *rest) = answer, state.positions
        editable, sequences = state.canvas.editable, state.sequences
        due = editable[sequences, position]
        tokens = state.tokens.clone()
        uniform = state.uniform[sequences, position]
        tokens[sequences[due], position] = draw(state.context.warper(log_p[due]), uniform[due])
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        left = editable & (columns > position)
        is_unfinished = left[sequences].any(dim=1)
        if rest and not bool(is_unfinished.all()):
            sequences, cache = sequences[is_unfinished], cache.select(is_unfinished.nonzero()[:, 0])
        own = {"positions": tuple(rest), "sequences": sequences, "num_read": position, "cache": cache if rest else None}
        return state.advance(tokens, state.canvas.fraction_of(left), editable[:, position], not rest, **own)
