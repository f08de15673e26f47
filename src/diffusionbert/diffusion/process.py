"""The interface of a forward process on tokens and of its reverse step.

A process does not know how f is computed, and **`reverse` cannot see x0**: it has no such argument. Nothing here builds
a V×V matrix or a one-hot tensor; the tests check the closed forms against dense matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.shapes import Batch, PerTarget, PositionMask, TargetLogProbs, Targets, Times, Tokens
from diffusionbert.diffusion.tokens import AnyPrediction

Warp = Callable[[TargetLogProbs], TargetLogProbs]


class Process(nn.Module, ABC):
    """A forward process q(x_t | x0) and, given a network's log f(v | x_t), the reverse step p(x_s | x_t)."""

    schedule: NoiseSchedule

    @abstractmethod
    def prior(self, x0: Batch, noise: Noise) -> Batch:
        """Draws x at t = 1: noise at every editable position."""

    @abstractmethod
    def corrupt(self, x0: Batch, t: Times, noise: Noise) -> Batch:
        """Draws x_t from q(x_t | x0)."""

    @abstractmethod
    def targets(self, x_t: Batch) -> PositionMask:
        """The N target positions, at which the network is queried."""

    @abstractmethod
    def reverse(
        self, x_t: Batch, log_f: TargetLogProbs, s: Times, t: Times, warp: Warp | None = None
    ) -> TargetLogProbs:
        """log p(x_s | x_t) at the target positions; `warp`, a logits warper, is applied to p(x0 | x_t)."""

    @abstractmethod
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
        """KL(q(x_s | x_t, x0) ‖ p(x_s | x_t)) at each target position, in nats (float64).

        `hybrid` is the weight of an auxiliary cross-entropy, -log p(x0 | x_t, t) (D3PM, equation 5).
        """

    def require_finite_divergence(self) -> None:
        """Raises ValueError if the divergence can be infinite even for a network that rules out no token."""
