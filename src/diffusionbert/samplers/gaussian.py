"""Ancestral sampling of word vectors (Ho et al. 2020, algorithm 2; Li et al. 2022, Diffusion-LM, section 4.2).

    x_1 ~ N(0, 1),   x_s ~ q(x_s | x_t, x0 = x̂0(x_t, t))  for every step (s, t) of the time grid,   w = round(x_0)

The clamping trick replaces x̂0 with the vector of the nearest token, so that a step commits to some token. The original
code differs in two ways: it clamps at all steps or none, and its last step takes the mean, without noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionbert.diffusion.gaussian import Gaussian, require_clamping
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, TargetIndices, Tokens, Vectors
from diffusionbert.diffusion.tokens import draw
from diffusionbert.networks.embedding import VectorNetwork, clamp_to_words
from diffusionbert.registry import register
from diffusionbert.samplers.base import Sampler, SamplingContext, State, VectorQuery


@dataclass(frozen=True, eq=False, kw_only=True)
class GaussianState(State):
    """The noisy vectors x_t of the sequences with an editable position."""

    process: Gaussian
    word_vectors: VectorNetwork
    vectors: Tensor  # [sequences, positions, D]
    sequences: TargetIndices
    part: Batch  # these sequences of the canvas
    clamped: tuple[bool, ...]  # whether step k of the time grid uses the clamping trick
    num_left: int  # the number of steps that are left


@register("gaussian-ancestral")
@dataclass(frozen=True)
class GaussianAncestral(Sampler):
    """Takes one reverse step after another on vectors; states show each vector as its nearest allowed token.

    There is no distribution over tokens before the end, so temperature, top-k and top-p act only on the last rounding:
    if any of them is set, the token is drawn from p(w | x) (unwarped with top-p 1), else the nearest token is taken.
    Forbidden tokens are never generated and never clamped to. A time grid that ends before 1 continues from the tokens
    of the canvas, with the noise of that time added.

    Args:
        clamped: Steps from times up to this one use the clamping trick. True or 1 means all steps, False or 0 none,
            None those from times at which the token is certain.
    """

    clamped: bool | float | None = None

    def __post_init__(self) -> None:
        require_clamping(self.clamped)

    def resolve(self, context: SamplingContext) -> GaussianAncestral:
        if not isinstance(context.process, Gaussian):
            raise ValueError(
                "the sampler 'gaussian-ancestral' is for a model with Gaussian noise, which this is not; leave it out"
            )
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> GaussianState:
        """x at the end of the time grid; at t = 1 it does not depend on the canvas."""
        process, word_vectors, grid = context.process, context.word_vectors, context.grid
        assert isinstance(process, Gaussian)
        assert word_vectors is not None
        sequences = canvas.editable.any(dim=1).nonzero()[:, 0]
        part, end, num_steps = canvas.select(sequences), float(grid[-1]), len(grid) - 1
        if end < 1 and not bool(word_vectors.allowed[part.tokens[part.editable]].all()):
            raise ValueError(
                f"a time grid that ends at {end} continues from the tokens of the canvas, but some editable position "
                "holds a token that is not allowed, such as [MASK]: give text there, or a time grid that ends at 1"
            )
        clean, t = word_vectors.embed(part.tokens), part.constant_times(end)
        x = process.corrupt(clean, part.editable, part.example, t, Noise(seed, num_steps))
        num_tokens = word_vectors.allowed.sum()
        clamped = process.clamps(grid[1:].to(x.device), self.clamped, x.shape[-1], num_tokens)
        tokens = _shown(canvas, sequences, _nearest(context, word_vectors, part, x))
        own = {"process": process, "word_vectors": word_vectors, "vectors": x, "sequences": sequences, "part": part}
        own |= {"clamped": tuple(clamped.tolist()), "num_left": num_steps}
        return GaussianState.begin(context, canvas, seed, tokens, canvas.constant_times(end), done=False, **own)

    def query(self, state: GaussianState) -> VectorQuery | None:
        if not len(state.sequences):
            return None
        t = state.part.constant_times(float(state.context.grid[state.num_left]))
        return VectorQuery(state.vectors, state.part.attention_mask, t)

    def update(self, state: GaussianState, answer: Vectors | None) -> GaussianState:
        context, index = state.context, state.num_left - 1
        tokens, x_s = state.tokens, state.vectors
        if answer is not None:
            x_s = _step(state, answer)
            draws = index == 0 and not context.config.is_plain
            rounded = _drawn(state, x_s) if draws else _nearest(context, state.word_vectors, state.part, x_s)
            tokens = _shown(state.canvas, state.sequences, rounded)
        time = state.canvas.constant_times(float(context.grid[index]))
        return state.advance(tokens, time, state.canvas.editable.any(dim=1), index == 0, vectors=x_s, num_left=index)


def _step(state: GaussianState, x0_hat: Vectors) -> Vectors:
    """x_s ~ q(x_s | x_t, x0 = x̂0)."""
    part, x_t, index = state.part, state.vectors, state.num_left - 1
    s, t = (part.constant_times(time) for time in state.context.grid[index : index + 2].tolist())
    if state.clamped[index]:
        x0_hat = clamp_to_words(state.word_vectors, x0_hat, part.editable, state.context.forbidden)
    mean, deviation = state.process.reverse(x_t, x0_hat, s, t)
    drawn = Noise(state.seed, index).normal(part.example, Purpose.GAUSS, *x_t.shape[1:]).to(x_t.dtype)
    return torch.where(part.editable[..., None], mean + deviation * drawn, x_t)


def _shown(canvas: Batch, sequences: TargetIndices, tokens: Tensor) -> Tokens:
    """The canvas with the tokens of some sequences."""
    shown = canvas.tokens.clone()
    shown[sequences, : tokens.shape[1]] = tokens
    return shown


def _nearest(context: SamplingContext, word_vectors: VectorNetwork, part: Batch, x: Vectors) -> Tokens:
    return part.tokens.masked_scatter(part.editable, word_vectors.nearest(x, part.editable, context.forbidden))


def _drawn(state: GaussianState, x: Vectors) -> Tokens:
    part = state.part
    log_p = state.context.warper(state.word_vectors.log_words(x, part.editable))
    uniform = Noise(state.seed, 0).uniform(part.example, Purpose.SAMPLE, part.tokens.shape[1])
    return part.tokens.masked_scatter(part.editable, draw(log_p, uniform[part.editable]))
