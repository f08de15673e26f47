"""ReMDM (Wang et al. 2025, "Remasking discrete diffusion models with inference-time scaling", sections 3 and 4).

A step (s, t) remasks an unmasked token v with probability σ(v), and unmasks a masked position with

    p(x_s = v | x_t = M) = p(v | x_t, t) · (ᾱ_s(v) - (1 - σ(v))·ᾱ_t(v)) / (1 - ᾱ_t(v)),    M otherwise

The marginals q(x_s | x0) are those of the schedule for every σ for which the fraction is a probability, that is for
σ ≤ σ_max = min(1, (1 - ᾱ_s) / ᾱ_t). σ = 0 is ancestral sampling. The paper has one ᾱ for all tokens; here every token
has its own ᾱ and so its own σ. The network is queried only at masked positions, so σ does not depend on how well an
unmasked token fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Purpose
from diffusionbert.diffusion.schedules import Mean
from diffusionbert.diffusion.shapes import PerPosition, TargetLogProbs
from diffusionbert.registry import register
from diffusionbert.samplers.ancestral import GridSampler, GridState, after_step, draw_step
from diffusionbert.samplers.base import SamplingContext


class Strategy(Enum):
    """How σ follows from η."""

    CAP = "cap"  # σ = min(η, σ_max)
    RESCALE = "rescale"  # σ = η · σ_max


@register("remasking")
@dataclass(frozen=True)
class Remasking(GridSampler):
    """Remasks some of the unmasked tokens in every step, so that they can be replaced.

    Args:
        eta: η in [0, 1]: the largest probability per step that a token is remasked, or a fraction of the maximum.
        strategy: Whether η caps σ or scales its maximum.
    """

    eta: float = 0.1
    strategy: Strategy = Strategy.CAP

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be between 0 and 1, got {self.eta}; 0 never remasks a token")

    def resolve(self, context: SamplingContext) -> Remasking:
        schedule = context.absorbing(self).schedule
        if schedule.by_token and schedule.mean is Mean.SENTENCE:
            raise ValueError(
                f"the sampler 'remasking' cannot keep the marginals of {schedule}: survival depends on the sentence, "
                "which changes when tokens are remasked; use Mean.CORPUS, or the sampler 'renoising'"
            )
        return self

    def update(self, state: GridState, answer: TargetLogProbs | None) -> GridState:
        """Draws a token at every masked position from p(v | x_t, t), by a step down to 0; then masks some tokens."""
        process = state.process
        assert isinstance(process, Absorbing)
        s, t = state.interval
        x0_hat = draw_step(state, answer, torch.zeros_like(t))
        alpha_s, alpha_t = (process.survival(x0_hat, time) for time in (s, t))
        sigma = self._sigma(alpha_s, alpha_t)
        # Without reweighting, a token that cannot be masked at t may be predicted: it is unmasked at once.
        unmasking = torch.where(alpha_t < 1, (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), 1.0)
        unmasked = torch.where(state.targets, unmasking, 1 - sigma)
        # At positions that are not editable, survival is 1 and so is `unmasked`.
        masked = state.noise.per_position(x0_hat, Purpose.REMASK) >= unmasked
        return after_step(state, x0_hat.tokens.masked_fill(masked, process.mask_id))

    def _sigma(self, alpha_s: PerPosition, alpha_t: PerPosition) -> PerPosition:
        # Where ᾱ_t = 0 no token is unmasked, and σ is not used.
        highest = torch.where(alpha_t > 0, torch.minimum(alpha_t, 1 - alpha_s) / alpha_t, 0.0)
        return highest.clamp(max=self.eta) if self.strategy is Strategy.CAP else self.eta * highest


@register("renoising")
@dataclass(frozen=True)
class Renoising(GridSampler):
    """Predicts the text and adds noise again in every step (He et al. 2022, DiffusionBERT); for any noise on tokens.

        x̂0 ~ p(x0 | x_t, t) at the masked positions, x_t elsewhere;    x_s ~ q(x_s | x̂0)    for every step (s, t)

    An unmasked token is remasked with probability 1 - ᾱ_s. Under absorbing noise this is ReMDM with σ = 1 - ᾱ_s, so
    that masked and unmasked positions alike are unmasked with probability ᾱ_s. It is not ReMDM's maximum, which is
    larger.
    """

    def update(self, state: GridState, answer: TargetLogProbs | None) -> GridState:
        """x_s ~ q(x_s | x̂0); a step down to 0 draws x̂0 from p(x0 | x_t, t)."""
        s, t = state.interval
        x0_hat = draw_step(state, answer, torch.zeros_like(t))
        return after_step(state, state.process.corrupt(x0_hat, s, state.noise).tokens)
