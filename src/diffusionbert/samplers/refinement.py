"""SUNDAE's sampler (Savinov et al. 2022, "Step-unrolled denoising autoencoders for text generation", section 2.2).

    x_0: uniform random tokens;   x_k ~ f(· | x_{k-1}), each position independently, for k = 1 … steps

The paper uses a temperature below 1 and, for unconditional text, updates only a random fraction of the positions in
each step, because tokens drawn at the same time are independent. Here the first step draws all positions whatever the
fraction, so that no random token is left. The paper's decoding for translation and its length prediction are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch, Flags, PositionMask, TargetLogProbs
from diffusionbert.diffusion.tokens import draw
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.registry import register
from diffusionbert.samplers.base import Query, Sampler, SamplingContext, State


@dataclass(frozen=True, eq=False, kw_only=True)
class RefinementState(State):
    """Which positions the next step draws."""

    due: PositionMask
    unfinished: Flags  # the sequences that may still change
    num_steps: int  # the number of steps so far


@register("refinement", aliases=("refining",))
@dataclass(frozen=True)
class Refinement(Sampler):
    """Starts from random tokens and redraws all positions again and again.

    A time-conditioned network is always given the time 1, as in training. If steps are deterministic (`top_k=1` and all
    positions), a sequence that no longer changes is finished: every further step would give the same tokens.

    Args:
        update_fraction: The fraction of the positions that a step after the first draws, rounded up.
    """

    update_fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.update_fraction <= 1:
            raise ValueError(
                f"update_fraction must be above 0 and at most 1, got {self.update_fraction}; 1 updates all"
            )

    def resolve(self, context: SamplingContext) -> Refinement:
        if context.process is not None or context.causal or context.allowed_tokens is None:
            raise ValueError(
                "the sampler 'refinement' is for a model trained by SUNDAE, which this is not; leave it out"
            )
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> RefinementState:
        assert context.allowed_tokens is not None
        noise = Uniform(Linear(), context.allowed_tokens.to(canvas.tokens.device))
        unfinished = canvas.editable.any(dim=1)
        tokens, own = noise.prior(canvas, Noise(seed)).tokens, {"due": canvas.editable, "unfinished": unfinished}
        return RefinementState.begin(context, canvas, seed, tokens, unfinished.double(), num_steps=0, **own)

    def query(self, state: RefinementState) -> Query | None:
        return Query.of(state.x, state.canvas.constant_times(1.0), state.due)

    def update(self, state: RefinementState, answer: TargetLogProbs) -> RefinementState:
        config, number = state.context.config, state.num_steps + 1
        uniform = Noise(state.seed, number).per_position(state.x, Purpose.SAMPLE)
        drawn = draw(state.context.warper(answer), uniform[state.due])
        tokens = state.tokens.masked_scatter(state.due, drawn)
        unfinished = state.unfinished
        if config.top_k == 1 and self.update_fraction == 1:
            unfinished = (tokens != state.tokens).any(dim=1)
        time = unfinished.double() * (1 - number / config.steps)
        done = number == config.steps or not bool(unfinished.any())
        due = self._fraction(state.canvas, state.seed, number + 1) & unfinished[:, None]
        return state.advance(tokens, time, state.unfinished, done, due=due, unfinished=unfinished, num_steps=number)

    def _fraction(self, canvas: Batch, seed: int, number: int) -> PositionMask:
        """The random positions of each sequence that step `number` draws."""
        fraction = self.update_fraction * canvas.editable.sum(dim=1).double()
        # Slightly less, or 0.28 · 25 = 7.000000000000001 would be rounded up to 8.
        return Noise(seed, number).chosen(canvas, (fraction - 1e-9).ceil().long())
