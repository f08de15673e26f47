"""The contract of a forward process on tokens and its reverse step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.shapes import Batch, PerTarget, PositionMask, TargetLogProbs, Times, Tokens

Warp = Callable[[TargetLogProbs], TargetLogProbs]


class Process(nn.Module, ABC):
    """How text turns into noise and, given a network's log f(v | x_t), how one step of the way back goes."""

    schedule: NoiseSchedule

    @abstractmethod
    def prior(self, x0: Batch, noise: Noise) -> Batch:
        """Draws x at t = 1: noise at every editable place."""

    @abstractmethod
    def corrupt(self, x0: Batch, t: Times, noise: Noise) -> Batch:
        """Draws x_t from q(x_t | x0)."""

    @abstractmethod
    def targets(self, x_t: Batch) -> PositionMask:
        """The N places at which the network's answer matters."""

    @abstractmethod
    def reverse(
        self, x_t: Batch, log_f: TargetLogProbs, s: Times, t: Times, warp: Warp | None = None
    ) -> TargetLogProbs:
        """log p(x_s | x_t) at the asked places; `warp` acts on p(x0 | x_t), before the step is made of it."""

    @abstractmethod
    def divergence(self, x0: Tokens, x_t: Batch, log_f: TargetLogProbs, s: Times, t: Times) -> PerTarget:
        """KL(q(x_s | x_t, x0) ‖ p(x_s | x_t)) at each asked place, in nats (float64)."""

    @abstractmethod
    def require_finite_divergence(self) -> None:
        """Raises ValueError if the divergence can be infinite for a network that believes everything possible."""

    @abstractmethod
    def log_clean(self, x0: Tokens, x_t: Batch, log_f: TargetLogProbs, t: Times) -> PerTarget:
        """log p(x0 | x_t, t) at each asked place (float64)."""
