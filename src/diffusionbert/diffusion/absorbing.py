"""Absorbing noise: tokens turn into `[MASK]` (Austin et al. 2021, D3PM; He et al. 2022, DiffusionBERT).

The schedule's survival ᾱ_t(v) is MDLM's α_t (Sahoo et al. 2024). `Absorbing` states the equations. This module does
not know how the network computes f.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diffusionbert.diffusion.process import Process, Warp
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Mean, NoiseSchedule, TokenInformation
from diffusionbert.diffusion.shapes import (
    Batch,
    Grid,
    PerPosition,
    PerSequence,
    PerStep,
    PerTarget,
    PerToken,
    PositionMask,
    TargetIndices,
    TargetLogProbs,
    Targets,
    TargetTokens,
    Times,
    Tokens,
    exact_bits,
    from_bits,
    sequence_index,
)
from diffusionbert.diffusion.tokens import AnyPrediction, Prediction, as_prediction, finite_log


class LearnedExponents(nn.Module):
    """The exponents w(v) of `Power` as parameters (Shi et al. 2024, GenMD4, §6), each between `LOWEST` and `HIGHEST`.

    With a time-agnostic network only their ratios matter: t → t^c turns w into c·w. The range keeps estimates
    well-behaved: with times drawn from `Early`, the bound has finite variance for w > 1/2.

    The parameters are the logits of where log w lies in this range, divided by `GAIN` so that they can share the
    network's learning rate. Rounding them to bfloat16 changes w by about 0.1 %, and the result is just as valid.
    """

    LOWEST, HIGHEST, GAIN = 0.6, 10.0, 10.0

    def __init__(self, initial: PerToken):
        super().__init__()
        if not bool(((initial >= self.LOWEST) & (initial <= self.HIGHEST)).all()):
            raise ValueError(
                f"exponents must be between {self.LOWEST} and {self.HIGHEST}, got {float(initial.min()):g} to "
                f"{float(initial.max()):g}; 1 for all tokens is the linear schedule"
            )
        fraction = (initial.double() / self.LOWEST).log() / math.log(self.HIGHEST / self.LOWEST)
        self.logits = nn.Parameter((fraction.logit(eps=1e-6) / self.GAIN).float())  # eps keeps both ends finite

    def forward(self) -> PerToken:
        """w(v) for every token, in float64."""
        fraction = (self.GAIN * self.logits.double()).sigmoid()
        return self.LOWEST * (fraction * math.log(self.HIGHEST / self.LOWEST)).exp()


_ROUNDING = 1e-4  # far above the rounding error of a float32 probability


class Absorbing(Process):
    """The process that masks tokens for good.

    A token masked at t is unmasked at s with probability r_{s|t}(v) = (ᾱ_s(v) - ᾱ_t(v)) / (1 - ᾱ_t(v)). Under a
    token-dependent schedule, the posterior over the masked token depends on t:

        p(v | x_t, t) ∝ f(v | x_t) · (1 - ᾱ_t(v))                 so f can be time-agnostic
        p(x_s = v | x_t = M) = p(v | x_t, t) · r_{s|t}(v)         M otherwise

    Under a schedule with the sentence mean, ᾱ depends on the mean information c of the whole sequence. The forward
    process knows it; the reverse process estimates it from x_t and the network alone.
    """

    _information: Tensor
    _distinct: Tensor  # its distinct values, far fewer than there are tokens

    def __init__(
        self,
        schedule: NoiseSchedule,
        mask_id: int,
        information: TokenInformation | LearnedExponents | None = None,
        reweighted: bool = True,
    ):
        """`reweighted=False` is an ablation: it drops the factor 1 - ᾱ_t(v), so that p(v | x_t, t) = f."""
        super().__init__()
        if schedule.by_token and information is None:
            raise ValueError(f"{schedule} needs token information; give TokenInformation.from_counts(counts)")
        self.learned = information if isinstance(information, LearnedExponents) else None
        if self.learned is not None and not schedule.takes_exponents:
            raise ValueError(
                f"learned exponents need the schedule Power(), got {schedule}; use TokenInformation with it"
            )
        self.schedule = schedule
        self.mask_id = mask_id
        self.reweighted = reweighted
        self.guesses_center = schedule.by_token and schedule.mean is Mean.SENTENCE
        # A token-independent schedule gets a vocabulary of one token with mean information.
        one = TokenInformation(torch.ones(1, dtype=torch.float64), mean=1.0)
        known = information if schedule.by_token and isinstance(information, TokenInformation) else one
        self.corpus_mean = known.mean
        self.register_buffer("_information", exact_bits(known.values), persistent=False)
        self.register_buffer("_distinct", exact_bits(torch.unique(known.values)), persistent=False)

    @property
    def information(self) -> Tensor:
        """h(v) for every token, or for the single token of a token-independent schedule."""
        return from_bits(self._information) if self.learned is None else self.learned()

    def fixed(self) -> Absorbing:
        """A copy in which learned exponents are constants and get no gradient."""
        values = TokenInformation(self.information.detach(), self.corpus_mean)
        return Absorbing(self.schedule, self.mask_id, values, self.reweighted)

    def prior(self, x0: Batch, noise: Noise) -> Batch:
        """All editable positions masked; nothing is drawn."""
        return replace(x0, tokens=x0.tokens.masked_fill(x0.editable, self.mask_id))

    def survival(self, x0: Batch, t: Times) -> PerPosition:
        """ᾱ_t of the token at each position; 1 where the position is not editable."""
        alpha = self._survival(t, self._information_of(x0.tokens), self._center(x0))
        return torch.where(x0.editable, alpha, 1.0)

    def corrupt(self, x0: Batch, t: Times, noise: Noise, purpose: Purpose = Purpose.CORRUPT) -> Batch:
        """Masks each editable token with probability 1 - ᾱ_t."""
        uniform = noise.per_position(x0, purpose)
        return replace(x0, tokens=x0.tokens.masked_fill(uniform >= self.survival(x0, t), self.mask_id))

    def log_corrupt(self, x0: Tokens, x_t: Batch, t: Times) -> PerSequence:
        """log q(x_t | x0) of each sequence, for an x_t that `corrupt` can draw."""
        alpha = self.survival(replace(x_t, tokens=x0), t)
        return torch.where(self.targets(x_t), 1 - alpha, alpha).log().sum(dim=1)

    def targets(self, x_t: Batch) -> PositionMask:
        """The masked positions."""
        return x_t.editable & (x_t.tokens == self.mask_id)

    def unmask_probability(
        self, x0: Tokens, x_t: Batch, s: Times, t: Times, targets: Targets | None = None
    ) -> PerTarget:
        """r_{s|t} of the true token at each masked position, under the forward process."""
        clean = replace(x_t, tokens=x0)
        targets = targets or Targets.of(self.targets(x_t))
        alpha_s, alpha_t = targets.take(self.survival(clean, s)), targets.take(self.survival(clean, t))
        return targets.counted(_unmask_probability(alpha_s, alpha_t))

    def reverse(
        self,
        x_t: Batch,
        log_f: TargetLogProbs,
        s: Times,
        t: Times,
        warp: Warp | None = None,
        sequences: TargetIndices | None = None,
    ) -> TargetLogProbs:
        """log p(x_s | x_t) at the masked positions; entry `mask_id` is the probability of staying masked.

        Under a token-independent schedule, `log_f` may cover just some of them; `sequences` then gives their sequences.
        """
        masked, unmask_probability = self.of_vocabulary(s, t, self.guessed_center(x_t, log_f))
        sequences = sequence_index(self.targets(x_t)) if sequences is None else sequences
        log_p0 = reweighted(log_f, masked.log(), sequences, warp)
        log_stay = (log_p0 + torch.log1p(-unmask_probability).to(log_f.dtype)[sequences]).logsumexp(dim=-1)
        log_p = log_p0 + unmask_probability.log().to(log_f.dtype)[sequences]
        log_p[:, self.mask_id] = log_stay
        return log_p

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
        """r·log(r / p(x_s = x0)) + (1-r)·log((1-r) / p(x_s = M)), one term of the strict bound, in log space."""
        targets, prediction = targets or Targets.of(self.targets(x_t)), as_prediction(log_f)
        r = self.unmask_probability(x0, x_t, s, t, targets)
        sequences, x0_tokens = targets.sequences, targets.take(x0)
        unmasking, staying = self._divergence_weights(s, t, self.guessed_center(x_t, prediction, targets))
        # G_t - G_s and G_s.
        log_f_x0, log_unmasking, log_staying = self._log_sums(prediction, x0_tokens, (unmasking, staying), sequences)
        log_total = torch.where((s == 0)[sequences], log_unmasking, torch.logaddexp(log_unmasking, log_staying))
        unmasking_x0 = self._pick(unmasking, sequences, x0_tokens)
        log_x0 = log_f_x0 + unmasking_x0.log() - log_total
        # log G_s - log G_t without cancellation: accurate whether a step unmasks little or a lot.
        log_stay = nn.functional.logsigmoid(log_staying - log_unmasking)
        unmasked = torch.where(r > 0, r * (r.log() - log_x0), 0.0)
        stayed = torch.where(r < 1, (1 - r) * (torch.log1p(-torch.where(r < 1, r, 0.0)) - log_stay), 0.0)
        if not hybrid:
            return unmasked + stayed
        staying_x0 = torch.where((s == 0)[sequences], 0.0, self._pick(staying, sequences, x0_tokens))
        return unmasked + stayed - hybrid * (log_f_x0 + (unmasking_x0 + staying_x0).log() - log_total)

    def _divergence_weights(self, s: Times, t: Times, center: PerSequence) -> tuple[Tensor, Tensor]:
        """(1 - ᾱ_t)·r_{s|t} and (1 - ᾱ_t)·(1 - r_{s|t}) of every token, [B, V], up to a constant."""
        masked, unmask_probability = self.of_vocabulary(s, t, center)
        # At s = 0 nothing stays masked and that term is 0; a finite substitute also keeps the gradient finite.
        staying = torch.where((s == 0)[:, None], 1.0, masked * (1 - unmask_probability))
        return masked * unmask_probability, staying

    def compile_training(self, backend: str | Callable[..., Any]) -> None:
        """Fuses what the divergence computes for every token of the vocabulary."""
        if self.schedule.by_token:
            fused = torch.compile(self._divergence_weights, dynamic=True, backend=backend)
            self._divergence_weights = fused  # type: ignore[method-assign]

    def rate(self, x0: Tokens, x_t: Batch, log_f: AnyPrediction, t: Times, targets: Targets | None = None) -> PerTarget:
        """The divergence of an infinitesimal step per unit of time, at each masked position.

        It equals w·log(w·G / (f(x0)·-ᾱ'(x0))) - w + G'/G, where w = -ᾱ'/(1-ᾱ) comes from the forward process, and G,
        G' and ᾱ'(x0) from the reverse process.
        """
        self.require_finite_rate()
        t = t.clamp(min=torch.finfo(t.dtype).tiny)  # nothing is masked at 0, but an infinite density has no gradient
        targets, prediction = targets or Targets.of(self.targets(x_t)), as_prediction(log_f)
        sequences, x0_tokens = targets.sequences, targets.take(x0)
        clean, center = replace(x_t, tokens=x0), self.guessed_center(x_t, prediction, targets)
        own_density = targets.take(self._masking_density(t, self._information_of(x0), self._center(clean)))
        w = targets.counted(own_density / (1 - targets.take(self.survival(clean, t))))
        density = self._masking_density(t, self.information, center)
        weights = 1 - self._survival(t, self.information, center), density
        log_f_x0, log_total, log_flow = self._log_sums(prediction, x0_tokens, weights, sequences)
        log_x0 = log_f_x0 + self._pick(density, sequences, x0_tokens).log() - log_total
        return torch.where(w > 0, w * (w.log() - log_x0 - 1), 0.0) + (log_flow - log_total).exp()

    def log_clean(
        self, x0: Tokens, x_t: Batch, log_f: AnyPrediction, t: Times, targets: Targets | None = None
    ) -> PerTarget:
        """log f(x0) + log(1 - ᾱ_t(x0)) - log G_t."""
        targets, prediction = targets or Targets.of(self.targets(x_t)), as_prediction(log_f)
        masked, _ = self.of_vocabulary(torch.zeros_like(t), t, self.guessed_center(x_t, prediction, targets))
        sequences, x0_tokens = targets.sequences, targets.take(x0)
        log_f_x0, log_total = self._log_sums(prediction, x0_tokens, (masked,), sequences)
        return log_f_x0 + self._pick(masked, sequences, x0_tokens).log() - log_total

    def guessed_center(self, x_t: Batch, log_f: AnyPrediction, targets: Targets | None = None) -> PerSequence:
        """The ĉ of the reverse process: the mean of h over unmasked tokens and of E_f[h] over masked positions.

        It does not depend on t, so it can be cached until x_t or the network's output changes.
        """
        prediction = as_prediction(log_f)
        if self.schedule.by_token and len(self.information) != prediction.vocab_size:
            raise ValueError(
                f"the token information must cover the {prediction.vocab_size} tokens of the network, got "
                f"{len(self.information)}; count tokens over the network's whole vocabulary"
            )
        if not self.guesses_center:
            return self._center(x_t)
        targets = targets or Targets.of(self.targets(x_t))
        expected, known = prediction.mean(self.information), self._information_of(x_t.tokens)
        return _mean_over(torch.where(targets.mask, targets.scatter(expected), known), x_t.editable)

    def log_p0(
        self, log_f: TargetLogProbs, sequences: TargetIndices, t: Times, center: PerSequence, warp: Warp | None = None
    ) -> TargetLogProbs:
        """log p(v | x_t, t) for every token v at masked positions, given the time and center of each sequence."""
        return reweighted(log_f, self.log_weights(t, center), sequences, warp)

    def log_weights(self, t: Times, center: PerSequence) -> Tensor:
        """log p(v | x_t, t) - log f(v | x_t) for every token v, up to a constant: [B, V]."""
        return self._weight(self._survival(t, self.information, center)).log()

    def unmask_probability_of(self, tokens: TargetTokens, s: PerTarget, t: PerTarget, center: PerTarget) -> PerTarget:
        """r_{s|t} of one token at each masked position, under the reverse process."""
        relative = self._information_of(tokens) / center
        alpha_s, alpha_t = (self.schedule.survival(time, relative) for time in (s, t))
        return self._reverse_unmask_probability(alpha_s, alpha_t)

    def max_unmask_probability(self, s: Times, t: Times, center: PerSequence) -> PerSequence:
        """The largest r_{s|t}(v) over the tokens v that can be masked at t: no position unmasks with more than this."""
        distinct = from_bits(self._distinct) if self.learned is None else self.learned()
        alpha_s, alpha_t = (self._survival(time, distinct, center) for time in (s, t))
        unmask_probability = self._reverse_unmask_probability(alpha_s, alpha_t)
        largest = torch.where(self._weight(alpha_t) > 0, unmask_probability, 0.0).amax(dim=1)
        return torch.where(s > 0, largest, 1.0)  # also where t is so small that no token can be masked, to rounding

    def may_unmask(self, x_t: Batch, s: Times, t: Times, uniform: PerPosition) -> PositionMask | None:
        """The masked positions that `draw_reverse` may unmask given these uniform numbers, whatever the network says.

        A position is unmasked with probability at most `max_unmask_probability`, and "stay masked" comes first in the
        CDF, so it takes a number near 1. Returns None (any masked position may be unmasked) if the reverse process
        guesses the sentence mean, because the guess depends on the network.
        """
        if self.guesses_center:
            return None
        largest = self.max_unmask_probability(s, t, self._center(x_t))[:, None] + _ROUNDING
        return self.targets(x_t) & (uniform > 1 - largest)

    def unmasking(self, grid: Grid) -> tuple[PerStep, PerStep]:
        """For each interval of a time grid, the number above which `draw_reverse` may unmask, and above which it does.

        Only for token-independent schedules, where neither depends on the network. The gap between the two allows for
        rounding.
        """
        assert not self.schedule.by_token
        s, t = grid[:-1], grid[1:]
        stay = 1 - self.max_unmask_probability(s, t, self.information.new_full((len(s),), self.corpus_mean))
        return stay - _ROUNDING, torch.where(stay > 0, stay + _ROUNDING, 0.0)

    def require_finite_divergence(self) -> None:
        if not self.schedule.has_finite_divergence:
            raise ValueError(
                f"{self.schedule} has an infinite strict bound: where the guessed sentence mean is off, the reverse "
                "process may give the true step probability 0; set a floor such as 0.05, or use the corpus mean"
            )

    def require_finite_rate(self) -> None:
        """Raises ValueError for a token-dependent schedule without reweighting."""
        if self.schedule.by_token and not self.reweighted:
            raise ValueError(
                f"{self.schedule} has no finite continuous-time bound without reweighting; "
                "use a time grid, or reweighted=True"
            )

    def of_vocabulary(self, s: Times, t: Times, center: PerSequence) -> tuple[Tensor, Tensor]:
        """p(v | x_t, t) / f(v | x_t) and r_{s|t}(v), both [B, V], or [B, 1] for a token-independent schedule."""
        alpha_s, alpha_t = (self._survival(time, self.information, center) for time in (s, t))
        return self._weight(alpha_t), self._reverse_unmask_probability(alpha_s, alpha_t)

    def _weight(self, alpha_t: Tensor) -> Tensor:
        """p(v | x_t, t) / f(v | x_t), up to a constant: 1 if it is the same for all tokens, however small t is."""
        return 1 - alpha_t if self.reweighted and self.schedule.by_token else torch.ones_like(alpha_t)

    def _reverse_unmask_probability(self, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        """r_{s|t}, or 1 for tokens that cannot be masked at t, which matter only without reweighting."""
        can_be_masked = alpha_t < 1
        # A division by 0 would make gradients NaN even where its result is not used.
        r = _unmask_probability(alpha_s, torch.where(can_be_masked, alpha_t, 0.0))
        return torch.where(can_be_masked, r, 1.0)

    def _survival(self, t: Times, information: Tensor, center: PerSequence) -> Tensor:
        return self.schedule.survival(t[:, None], information / center[:, None])

    def _masking_density(self, t: Times, information: Tensor, center: PerSequence) -> Tensor:
        return self.schedule.masking_density(t[:, None], information / center[:, None])

    def _information_of(self, tokens: Tensor) -> Tensor:
        return self.information[tokens] if self.schedule.by_token else self.information.expand(tokens.shape)

    def _center(self, x0: Batch) -> PerSequence:
        """The c of the forward process."""
        if not self.guesses_center:
            return self.information.new_full((len(x0.tokens),), self.corpus_mean)
        return _mean_over(self._information_of(x0.tokens), x0.editable)

    def _log_sums(
        self, prediction: Prediction, tokens: TargetTokens, weights: tuple[Tensor, ...], sequences: TargetIndices
    ) -> list[Tensor]:
        """log f(token), then log Σ_v f(v)·weight(v) for each table of weights, one row of it per sequence."""
        if self.schedule.by_token:
            return prediction.log_probs(tokens, [finite_log(weight) for weight in weights], sequences)
        # All tokens have the same weight, and f sums to 1.
        return [prediction.log_prob(tokens), *(weight.log()[sequences, 0] for weight in weights)]

    def _pick(self, weights: Tensor, sequences: Tensor, tokens: TargetTokens) -> PerTarget:
        """weight(v) of the given tokens."""
        return weights[sequences, tokens if self.schedule.by_token else torch.zeros_like(tokens)]


def _unmask_probability(alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """r_{s|t}, the probability that a token masked at t is unmasked at s; clamped, as rounding may make it negative."""
    return ((alpha_s - alpha_t) / (1 - alpha_t)).clamp(min=0)


def reweighted(
    log_f: TargetLogProbs, log_weights: Tensor, sequences: TargetIndices, warp: Warp | None
) -> TargetLogProbs:
    """log p(v | x_t, t): f(v) times the weights of its sequence, normalized and warped."""
    log_p0 = (log_f + log_weights.to(log_f.dtype)[sequences]).log_softmax(dim=-1)
    return log_p0 if warp is None else warp(log_p0)


def _mean_over(values: PerPosition, positions: PositionMask) -> PerSequence:
    return (values * positions).sum(dim=1) / positions.sum(dim=1).clamp(min=1)
