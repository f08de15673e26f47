"""Uniform noise (Hoogeboom et al. 2021, multinomial diffusion; Austin et al. 2021, D3PM uniform)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffusionbert.diffusion.process import Process, Warp
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.shapes import (
    Batch,
    PerSequence,
    PerTarget,
    PositionMask,
    TargetLogProbs,
    Targets,
    TargetTokens,
    Times,
    Tokens,
    TokenSet,
    sequence_index,
)
from diffusionbert.diffusion.tokens import AnyPrediction, as_prediction, log_prob_of


class Uniform(Process):
    """The process that replaces tokens with uniformly drawn ones.

    With K allowed tokens, α = ᾱ_t/ᾱ_s and δ the indicator,

        q(x_s = v | x_t, x0) = A(v)·B(v | x0) / Z(x0)
        A(v) = α δ(v = x_t) + (1-α)/K,   B(v | u) = ᾱ_s δ(v = u) + (1-ᾱ_s)/K,   Z(u) = ᾱ_t δ(u = x_t) + (1-ᾱ_t)/K
        p(x_s = v | x_t) = Σ_u f(u) q(x_s = v | x_t, u) = A(v)·(ᾱ_s f(v)/Z(v) + (1-ᾱ_s)/K · Σ_u f(u)/Z(u))
    """

    allowed_ids: Tensor
    allowed: Tensor

    def __init__(self, schedule: NoiseSchedule, allowed: TokenSet):
        super().__init__()
        if schedule.by_token:
            raise ValueError(
                f"uniform noise needs a token-independent schedule, got {schedule}; use linear, cosine or sqrt"
            )
        self.schedule = schedule
        self.num_allowed = int(allowed.sum())
        self.register_buffer("allowed", allowed, persistent=False)
        self.register_buffer("allowed_ids", allowed.nonzero()[:, 0], persistent=False)

    def prior(self, x0: Batch, noise: Noise) -> Batch:
        """A uniformly drawn token at every editable position."""
        uniform = noise.per_position(x0, Purpose.REPLACE)
        drawn = self.allowed_ids[(uniform * self.num_allowed).long()]
        return replace(x0, tokens=torch.where(x0.editable, drawn, x0.tokens))

    def corrupt(self, x0: Batch, t: Times, noise: Noise) -> Batch:
        """Replaces each editable token with probability 1 - ᾱ_t."""
        uniform = noise.per_position(x0, Purpose.CORRUPT)
        replaced = uniform >= self._survival(t)[:, None]
        return replace(x0, tokens=torch.where(replaced, self.prior(x0, noise).tokens, x0.tokens))

    def targets(self, x_t: Batch) -> PositionMask:
        """All editable positions: noise cannot be told from text."""
        return x_t.editable

    def reverse(
        self, x_t: Batch, log_f: TargetLogProbs, s: Times, t: Times, warp: Warp | None = None
    ) -> TargetLogProbs:
        if len(self.allowed) != log_f.shape[-1]:
            raise ValueError(
                f"the mask of allowed tokens must have {log_f.shape[-1]} entries, one per token of the network, got "
                f"{len(self.allowed)}; build it over the network's whole vocabulary"
            )
        log_p0 = log_f if warp is None else warp(log_f)
        # Tokens that are not allowed get a finite value until the end, which keeps the gradient finite.
        log_p0 = log_p0.masked_fill(~self.allowed, 0.0)
        targets = self.targets(x_t)
        sequences, current = sequence_index(targets), x_t.tokens[targets]
        alpha_s, alpha_t, step = self._alphas(s, t, sequences)
        same, other = self._mixed(alpha_t)
        p_current = log_prob_of(log_p0, current).exp()
        log_scattered = ((1 - alpha_s) / self.num_allowed).log() + (p_current / same + (1 - p_current) / other).log()
        log_kept = _multiply(log_p0, alpha_s / other, current, alpha_s / same)
        log_mixed = torch.logaddexp(log_kept, log_scattered[:, None].to(log_p0.dtype))
        step_same, step_other = self._mixed(step)
        log_p = _multiply(log_mixed, step_other, current, step_same)
        return log_p.masked_fill(~self.allowed, -torch.inf)

    def divergence(
        self,
        x0: Tokens,
        x_t: Batch,
        log_f: AnyPrediction,
        s: Times,
        t: Times,
        targets: Targets | None = None,
        hybrid: float = 0.0,
    ) -> PerTarget:
        """The posterior has three values (at x0, at x_t, elsewhere), so Σ_v log p(v) suffices for the KL."""
        targets = targets or Targets.of(self.targets(x_t))
        log_f = as_prediction(log_f).dense()
        log_p = self.reverse(x_t, log_f, s, t)
        sequences, current, clean = targets.sequences, targets.take(x_t.tokens), targets.take(x0)
        alpha_s, alpha_t, step = self._alphas(s, t, sequences)
        unchanged = current == clean
        normalizer = torch.where(unchanged, *self._mixed(alpha_t))
        step_same, step_other = self._mixed(step)
        from_clean, from_other = self._mixed(alpha_s)
        at_clean = torch.where(unchanged, step_same, step_other) * from_clean / normalizer
        at_current = torch.where(unchanged, 0.0, step_same * from_other / normalizer)
        elsewhere = step_other * from_other / normalizer
        num_elsewhere = self.num_allowed - torch.where(unchanged, 1, 2)
        log_at_clean, log_at_current = log_prob_of(log_p, clean), log_prob_of(log_p, current)
        log_elsewhere = log_p.masked_fill(~self.allowed, 0.0).sum(dim=-1).double() - log_at_clean
        log_elsewhere = log_elsewhere - torch.where(unchanged, 0.0, log_at_current)
        negative_entropy = torch.xlogy(at_clean, at_clean) + torch.xlogy(at_current, at_current)
        negative_entropy = negative_entropy + num_elsewhere * torch.xlogy(elsewhere, elsewhere)
        nats = negative_entropy - at_clean * log_at_clean - at_current * log_at_current - elsewhere * log_elsewhere
        return nats - hybrid * log_prob_of(log_f, clean) if hybrid else nats

    def _survival(self, t: Times) -> PerSequence:
        return self.schedule.survival(t, torch.ones_like(t))

    def _alphas(self, s: Times, t: Times, sequences: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ᾱ_s, ᾱ_t and ᾱ_t/ᾱ_s at each target position."""
        alpha_s, alpha_t = self._survival(s)[sequences], self._survival(t)[sequences]
        return alpha_s, alpha_t, alpha_t / alpha_s

    def _mixed(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of the token itself and of each other one, if it is kept with probability `kept`."""
        scattered = (1 - kept) / self.num_allowed
        return kept + scattered, scattered


def _multiply(log_p: TargetLogProbs, factor: PerTarget, tokens: TargetTokens, own_factor: PerTarget) -> TargetLogProbs:
    """Multiplies the probabilities at each position by `factor`, and that of one token by `own_factor`."""
    log_p = log_p + factor.log()[:, None].to(log_p.dtype)
    own = (own_factor.log() - factor.log())[:, None].to(log_p.dtype)
    return log_p.scatter_add(-1, tokens[:, None], own)
