"""Entropy-bounded sampling (Ben-Hamu et al. 2025, "Accelerated sampling from masked diffusion models via entropy
bounded unmasking", the EB-sampler).

A network gives the marginals of masked positions, so drawing a set U of them in one step ignores how they depend on
each other. The loss is their total correlation, which the marginals bound:

    KL( p(x_U) ‖ Π_i p(x_i) ) = Σ_i H(x_i) - H(x_U) ≤ Σ_i H(x_i) - max_i H(x_i),    since H(x_U) ≥ H(x_i)

A round takes positions in order, as many as keep the right-hand side at most ε: certain positions are free, and so is
one uncertain position, since its entropy is the maximum. So the distribution of a text after n rounds is within n·ε
nats of what one position per round would give, and ε = 0 is exactly that. p is what tokens are drawn from: a low
temperature, top-k and top-p reduce its entropy, so more positions fit.

By default, the order starts with a random position, drawn in advance as the noise would unmask it, and continues by
increasing entropy. Then ε = 0 is the distribution of the exact samplers in continuous time, and the other positions of
a round are all but certain. In the paper, the order is by increasing entropy throughout: more positions fit, but an
imperfect network then prefers likely texts. Tokens come from f, not from f·(1 - ᾱ_t): the sampler rather than the noise
chooses what is masked, so the schedule plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, Counts, PerPosition, PositionMask, TargetLogProbs
from diffusionbert.registry import register
from diffusionbert.samplers.base import (
    RoundSampler,
    RoundState,
    SamplingContext,
    due_after,
    masked_fraction,
)


class UnmaskingOrder(Enum):
    """The order in which a round considers positions."""

    RANDOM = "random"  # a random one first, then by increasing entropy
    ENTROPY = "entropy"  # by increasing entropy


@dataclass(frozen=True, eq=False, kw_only=True)
class EntropyBoundedState(RoundState):
    """The masked positions, and the random numbers drawn in advance."""

    rank: PerPosition  # the masked position of lowest rank is the random one
    uniform: PerPosition  # one number per position, to draw its token with


@register("entropy-bounded")
@dataclass(frozen=True)
class EntropyBounded(RoundSampler):
    """Unmasks positions together as long as they provably depend little on each other.

    The number of rounds depends on the text; `steps` limits it, at the expense of the bound.

    Args:
        epsilon: The most nats that a round may lose.
        order: The order in which positions are considered.
    """

    epsilon: float = 0.1
    order: UnmaskingOrder = UnmaskingOrder.RANDOM

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be >= 0 nats, got {self.epsilon}; 0 unmasks one position per round")

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return True

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> EntropyBoundedState:
        x, noise = context.absorbing(self).prior(canvas, Noise(seed)), Noise(seed)
        own = {"masked": canvas.editable, "num_rounds": 0}
        numbers = {"rank": noise.per_position(x, Purpose.ORDER), "uniform": noise.per_position(x, Purpose.SAMPLE)}
        return EntropyBoundedState.begin(context, canvas, seed, x.tokens, masked_fraction(context, x), **own, **numbers)

    def update(self, state: EntropyBoundedState, answer: TargetLogProbs) -> EntropyBoundedState:
        context, masked = state.context, state.masked
        p = context.warper.kept(answer)
        entropy = answer.new_full(masked.shape, torch.inf, dtype=torch.float64)
        entropy = entropy.masked_scatter(masked, p.entropy)
        kept = masked & self._kept(state, entropy)
        tokens = state.tokens.masked_scatter(kept, p.draw(kept[masked], state.uniform[kept]))
        time = masked_fraction(context, replace(state.x, tokens=tokens))
        left, called = masked & ~kept, masked.any(dim=1)
        own = {"masked": left, "num_rounds": state.num_rounds + 1}
        return state.advance(tokens, time, called, not bool(left.any()), **own)

    def _kept(self, state: EntropyBoundedState, entropy: PerPosition) -> PositionMask:
        """The first positions of the order, as many as the bound allows; infinite entropies are ignored."""
        key = entropy
        if self.order is UnmaskingOrder.RANDOM:
            first = state.rank.masked_fill(~state.masked, torch.inf).argmin(dim=1, keepdim=True)
            key = entropy.scatter(1, first, -1.0)
        order = key.argsort(dim=1, stable=True)
        in_order = entropy.gather(1, order)
        bound = in_order.cumsum(dim=1) - in_order.cummax(dim=1).values  # starts at 0 and never falls
        number = torch.arange(bound.shape[1], device=bound.device)
        is_kept = (bound <= self.epsilon) | (number < self._quota(state)[:, None])
        return torch.zeros_like(state.masked).scatter(1, order, is_kept)

    def _quota(self, state: EntropyBoundedState) -> Counts:
        """The least number of positions to unmask: one, or more if `steps` would not suffice otherwise."""
        length, num_masked = state.canvas.editable.sum(dim=1), state.masked.sum(dim=1)
        due = due_after(state.num_rounds, length, state.context.config.steps)
        return (due - (length - num_masked)).clamp(min=1)
