"""The Gaussian process on embeddings: the methods of `Process`, on vectors instead of tokens.

    q(x_t | x0) = N(√ᾱ_t · x0, 1 - ᾱ_t),   ᾱ_t = (1 - floor) · survival_t        (Ho et al. 2020; Li et al. 2022)

Unlike a token, a vector is never fully clean: its variance at t = 0 is `floor`. Rounding to a token is an extra step,
which belongs to the objective (Diffusion-LM), not to the process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.shapes import Flags, Keys, PerPosition, PositionMask, Times, Vectors


def require_clamping(until: bool | float | None) -> None:
    """Raises ValueError unless `until` is None or a time."""
    if until is not None and not 0 <= until <= 1:
        raise ValueError(f"`clamped` must be a time between 0 (no step) and 1 (all steps), got {until}")


@dataclass(frozen=True)
class Gaussian:
    """Variance-preserving Gaussian diffusion; positions that are not editable keep their vectors."""

    schedule: NoiseSchedule
    floor: float = 1e-4

    def __post_init__(self) -> None:
        if self.schedule.by_token:
            raise ValueError(
                f"Gaussian noise needs a token-independent schedule, got {self.schedule}; use linear, cosine or sqrt"
            )
        if not 0 < self.floor < 1:
            raise ValueError(f"`floor`, the variance at t = 0, must be in (0, 1), got {self.floor}; 1e-4 is usual")

    def prior(self, x0: Vectors, editable: PositionMask, example: Keys, noise: Noise) -> Vectors:
        """Draws x at t = 1: standard normal vectors at every editable position."""
        drawn = noise.normal(example, Purpose.GAUSS, *x0.shape[1:]).to(x0.dtype)
        return torch.where(editable[..., None], drawn, x0)

    def corrupt(self, x0: Vectors, editable: PositionMask, example: Keys, t: Times, noise: Noise) -> Vectors:
        """Draws x_t from q(x_t | x0)."""
        alpha = self.signal(t)[:, None, None]
        signal_scale, noise_scale = alpha.sqrt().to(x0.dtype), (1 - alpha).sqrt().to(x0.dtype)
        drawn = self.prior(x0, editable, example, noise)
        return torch.where(editable[..., None], signal_scale * x0 + noise_scale * drawn, x0)

    def reverse(self, x_t: Vectors, x0_hat: Vectors, s: Times, t: Times) -> tuple[Vectors, Tensor]:
        """Mean and standard deviation of p(x_s | x_t) = q(x_s | x_t, x0 = x0_hat)."""
        alpha_s, alpha_t = (self.signal(time)[:, None, None] for time in (s, t))
        step = alpha_t / alpha_s
        of_noisy = step.sqrt() * (1 - alpha_s) / (1 - alpha_t)
        of_clean = alpha_s.sqrt() * (1 - step) / (1 - alpha_t)
        variance = (1 - step) * (1 - alpha_s) / (1 - alpha_t)
        mean = of_noisy.to(x_t.dtype) * x_t + of_clean.to(x_t.dtype) * x0_hat
        return mean, variance.sqrt().to(x_t.dtype)

    def divergence(self, x0: Vectors, x0_hat: Vectors, s: Times, t: Times) -> PerPosition:
        """KL(q(x_s | x_t, x0) ‖ p(x_s | x_t)) = ½(SNR_s - SNR_t)·‖x0 - x0_hat‖² (Kingma et al. 2021, eq. 13)."""
        gained = self.signal_to_noise(s) - self.signal_to_noise(t)
        return gained[:, None] / 2 * (x0 - x0_hat).double().square().sum(dim=-1)

    def prior_divergence(self, x0: Vectors) -> PerPosition:
        """KL(q(x_1 | x0) ‖ N(0, 1)); 0 when survival ends at 0."""
        alpha = self.signal(torch.ones(1, dtype=torch.float64, device=x0.device))[:, None]
        per_axis_variance = (-alpha - torch.log1p(-alpha)) * x0.shape[-1]
        return (alpha * x0.double().square().sum(dim=-1) + per_axis_variance) / 2

    def clamps(self, t: Times, until: bool | float | None, width: int, num_words: Tensor) -> Flags:
        """Whether steps from t use the clamping trick: up to the given time or, if None, while `is_certain`."""
        return self.is_certain(t, width, num_words) if until is None else t <= until

    def is_certain(self, t: Times, width: int, num_words: Tensor) -> Flags:
        """Whether the token nearest to x_t / √ᾱ_t is almost always the true one: wrong less than once in V times."""
        return self._log_errors(t, width, num_words) < -num_words.double().log()

    def tells_words(self, t: Times, width: int, num_words: Tensor) -> Flags:
        """Whether, on average, fewer than one token is nearer to x_t / √ᾱ_t than the true one."""
        return self._log_errors(t, width, num_words) < 0

    def _log_errors(self, t: Times, width: int, num_words: Tensor) -> Times:
        """An upper bound on the log of the number of tokens nearer than the true one: log V - D·SNR/4.

        With D axes of variance 1, token vectors are √(2D) apart, and each is nearer with probability at most
        exp(-D·SNR/4).
        """
        return num_words.double().log() - width * self.signal_to_noise(t) / 4

    def unscaled(self, x_t: Vectors, t: Times) -> Vectors:
        """x_t / √ᾱ_t, the clean vector plus noise."""
        return x_t / self.signal(t).sqrt()[:, None, None].to(x_t.dtype)

    def evidence(self, x_t: Vectors, t: Times) -> Vectors:
        """√ᾱ_t / (1 - ᾱ_t)·x_t: log q(x_t | x0) = evidence·x0 - SNR·‖x0‖²/2 + what does not depend on x0."""
        signal = self.signal(t)
        return x_t * (signal.sqrt() / (1 - signal))[:, None, None].to(x_t.dtype)

    def signal_to_noise(self, t: Times) -> Times:
        """ᾱ_t / (1 - ᾱ_t), which falls from (1 - floor) / floor at t = 0 to 0."""
        signal = self.signal(t)
        return signal / (1 - signal)

    def signal(self, t: Times) -> Times:
        """ᾱ_t, the fraction of the variance that is signal."""
        return (1 - self.floor) * self.schedule.survival(t, torch.ones_like(t))
