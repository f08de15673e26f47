"""Categorical distributions given as log-probabilities: looking up, shaping, drawing.

`LogitsWarper` sharpens or cuts a distribution over *words*. It must never see the distribution that also contains
"stay masked": at temperature 0.1 that one would reveal every token in the last step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusionbert.diffusion.shapes import (
    PerPosition,
    PerTarget,
    PositionMask,
    TargetLogProbs,
    TargetTokens,
    Tokens,
    per_position,
)


def log_prob_of(log_p: TargetLogProbs, tokens: TargetTokens) -> PerTarget:
    """The log-probability of one given token in each row, in float64."""
    return log_p.gather(-1, tokens[:, None])[:, 0].double()


def nats_of(log_p: TargetLogProbs, tokens: Tokens, targets: PositionMask) -> PerPosition:
    """-log p of the token that stands at each asked place, put there; 0 elsewhere."""
    return per_position(-log_prob_of(log_p, tokens[targets]), targets)


def draw(log_p: TargetLogProbs, uniform: PerTarget) -> TargetTokens:
    """Draws one token for each row of `log_p` by inverting its distribution function at a uniform number.

    In float64, since float32 cuts off the rare words. A token of probability 0 is never drawn.
    """
    cumulative = log_p.double().exp().cumsum(dim=-1)
    if not bool((cumulative[:, -1] > 0).all()):  # NaN, too, is not above 0
        raise ValueError("some place has no possible word; are all words forbidden, or is the network's answer NaN?")
    threshold = uniform.double() * cumulative[:, -1]
    return torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]


@dataclass(frozen=True)
class LogitsWarper:
    """Temperature, top-k, top-p (in this order) and words that may not be written."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be finite and above 0, given {self.temperature}; for the likeliest word use top_k=1"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, given {self.top_k}; None keeps all words")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], given {self.top_p}; 1 keeps all words")

    def __call__(self, log_p: TargetLogProbs) -> TargetLogProbs:
        """Gives the shaped distribution, normalised."""
        if self.forbidden:
            log_p = log_p.index_fill(-1, torch.tensor(self.forbidden, device=log_p.device), -torch.inf)
        if self.temperature != 1:
            # Below the likeliest word, so that a tiny temperature leaves that one and does not overflow.
            below = (log_p - log_p.amax(dim=-1, keepdim=True)).double()
            log_p = (below / self.temperature).log_softmax(dim=-1).to(log_p.dtype)
        log_p = log_p.log_softmax(dim=-1)
        if self.top_k is not None and self.top_k < log_p.shape[-1]:
            best = log_p.topk(self.top_k, dim=-1)
            log_p = torch.full_like(log_p, -torch.inf).scatter(-1, best.indices, best.values)
            log_p = log_p.log_softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            log_p = _keep_nucleus(log_p, self.top_p).log_softmax(dim=-1)
        return log_p


def _keep_nucleus(log_p: TargetLogProbs, top_p: float) -> TargetLogProbs:
    """Keeps the smallest set of likeliest words that reaches `top_p` (Holtzman et al. 2020)."""
    values, order = log_p.sort(dim=-1, descending=True)
    # A word stays if those before it do not reach top_p yet, so that the likeliest always stays.
    mass_before = values.double().exp().cumsum(dim=-1) - values.double().exp()
    kept = values.masked_fill(mass_before >= top_p, -torch.inf)
    return torch.full_like(log_p, -torch.inf).scatter(-1, order, kept)
