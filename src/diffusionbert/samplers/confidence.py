"""Confidence-ordered sampling (Chang et al. 2022, MaskGIT, section 3.2; Kim et al. 2025, "Train for the worst, plan for
the best", section 4).

Each round draws a token at every masked position of a sequence and keeps the most confident ones, as many as
`due_after` says. With a threshold, all tokens that reach it are kept as well (Wu et al. 2025, Fast-dLLM), so that easy
sequences need fewer rounds. Tokens come from f, not from f·(1 - ᾱ_t): the sampler rather than the noise chooses what is
masked, so the schedule plays no part.

With one position per round and a criterion that does not depend on the drawn token (margin, entropy), this is an
autoregressive factorization in an order that depends on the tokens so far: exact if f is. Several positions per round,
a threshold or the probability of the drawn token make it a heuristic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerTarget, PositionMask, TargetLogProbs
from diffusionbert.diffusion.tokens import LogitsWarper, draw, entropy_of, in_parts
from diffusionbert.registry import register
from diffusionbert.samplers.base import (
    RoundSampler,
    RoundState,
    SamplingContext,
    draw_with_probability,
    due_after,
    masked_fraction,
)


class Criterion(Enum):
    """How confident the network is at a position; higher is more confident."""

    PROBABILITY = "probability"  # the probability of the drawn token
    MARGIN = "margin"  # the probability of the most probable token minus that of the second
    ENTROPY = "entropy"  # minus the entropy in nats: 0 is certain

    @property
    def range(self) -> tuple[float, float]:
        return (-torch.inf, 0.0) if self is Criterion.ENTROPY else (0.0, 1.0)


@register("confidence")
@dataclass(frozen=True)
class Confidence(RoundSampler):
    """Unmasks the most confident positions first.

    Args:
        criterion: How confidence is measured.
        threshold: Also unmask all positions whose confidence, on the criterion's own scale, reaches this value.
    """

    criterion: Criterion = Criterion.PROBABILITY
    threshold: float | None = None

    def __post_init__(self) -> None:
        low, high = self.criterion.range
        if self.threshold is not None and not low <= self.threshold <= high:
            raise ValueError(
                f"threshold must be between {low} and {high} for the criterion {self.criterion.value!r}, "
                f"got {self.threshold}; None means no threshold"
            )

    def keeps_tokens(self, context: SamplingContext) -> bool:
        return True

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> RoundState:
        x = context.absorbing(self).prior(canvas, Noise(seed))
        time = masked_fraction(context, x)
        return RoundState.begin(context, canvas, seed, x.tokens, time, masked=canvas.editable, num_rounds=0)

    def update(self, state: RoundState, answer: TargetLogProbs) -> RoundState:
        context, masked = state.context, state.masked
        uniform = Noise(state.seed, step=state.num_rounds).per_position(state.x, Purpose.SAMPLE)
        if self.criterion is Criterion.PROBABILITY:
            drawn, probability = draw_with_probability(context, answer, uniform[masked])
            kept = self._kept(state, probability)
            drawn = drawn[kept[masked]]
        else:  # tokens are drawn only where they are kept
            [certainty] = in_parts(lambda log_p: (self._certainty(context.exclusion, log_p),), answer)
            kept = self._kept(state, certainty)
            drawn = draw(context.warper(answer[kept[masked]]), uniform[kept])
        x = replace(state.x, tokens=state.tokens.masked_scatter(kept, drawn))
        still_masked, num_rounds = masked & ~kept, state.num_rounds + 1
        done, own = not bool(still_masked.any()), {"masked": still_masked, "num_rounds": num_rounds}
        return state.advance(x.tokens, masked_fraction(context, x), masked.any(dim=1), done, **own)

    def _certainty(self, exclusion: LogitsWarper, log_p: TargetLogProbs) -> PerTarget:
        """The confidence at a position, whichever token is drawn there: before top-k and temperature."""
        if self.criterion is Criterion.MARGIN:
            best = exclusion(log_p).topk(2, dim=-1).values.exp().double()
            return best[:, 0] - best[:, 1]
        return -entropy_of(exclusion.exclude(log_p))

    def _kept(self, state: RoundState, confidence: PerTarget) -> PositionMask:
        """The most confident positions of each sequence, as many as are due, and all that reach the threshold."""
        masked = state.masked
        length, num_masked = state.canvas.editable.sum(dim=1), masked.sum(dim=1)
        due = due_after(state.num_rounds, length, state.context.config.steps)
        # A sequence that is ahead because of a threshold still unmasks one position per round.
        quota = (due - (length - num_masked)).clamp(min=1)
        scores = confidence.new_full(masked.shape, -torch.inf).masked_scatter(masked, confidence)
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        kept = rank < quota[:, None]
        if self.threshold is not None:
            kept = kept | (scores >= self.threshold)
        return kept & masked
